"use strict";
// Whatever comes from run.json is shown as text, never as markup: peers choose their names.
const REFRESH_MS = 60000;
const FAULTS = {
    dropped_batches: "batches dropped", dropped_tensors: "tensors dropped", skipped_steps: "steps skipped",
    solo_steps: "steps taken alone", resyncs: "state downloads", refused_records: "records refused",
};
const ADMISSION = {
    invite: "This run admits whoever its host invites: ask for a code, and put it in the place of CODE.",
    list: "This run admits the machines on its host's list: the line below names your machine's peer id, for you to send to the host.",
};
const STATES = {
    "finished": run => `Finished: all ${count(run.total_steps)} steps are done. `,
    "training": () => "",
    "no trainers": () => "No trainers at the moment. ",
    "no answer": () => "No helper of the run answers: its host has stopped it, or is offline. ",
};
const COPY = " This run's data is a folder: ask its host for it, and put where your copy is in the place of COPY.";
const place = id => document.getElementById(id);
const PLOTS = {
    loss: {x: "step", lines: [["loss", "training", "#0f7fd6"], ["heldout_loss", "held-out", "#e07b00"]], range: {}},
    peers: {x: "time", lines: [["peers", "participants", "#0f9d6b"]], range: {start: 0}},
    speed: {x: "time", lines: [["samples_per_s", "samples/s", "#b0579a"]], range: {start: 0}},
};
const CLOCK = {seconds: "%H:%M:%S", minsec: "%H:%M:%S", minutes: "%H:%M", hourmin: "%H:%M", hours: "%H:%M"};
const MINUTE_MS = 60000;
const FEW_POINTS = 30;  // so few are marked: a line through one point is invisible
const drawn = {};  // Bokeh's data sources by plot
const inView = new Set();
let shown = null, bokeh = null;

const count = value => Math.round(value).toLocaleString("en");
const decimals = (value, digits) => value === null ? "–" : value.toFixed(digits);
const megabytes = bytes => bytes < 1e9 ? `${(bytes / 1e6).toFixed(1)} MB` : `${(bytes / 1e9).toFixed(2)} GB`;

function duration(seconds) {
    if (seconds === null) return "–";
    const minutes = Math.round(seconds / 60), hours = Math.floor(minutes / 60);
    if (minutes < 60) return `${minutes} min`;
    return hours < 24 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

function element(tag, text, options = {}) {
    const made = Object.assign(document.createElement(tag), options);
    made.append(text);
    return made;
}

function row(cells, tag = "td") {
    const made = document.createElement("tr");
    made.append(...cells.map(([text, className]) => element(tag, text, {className: className ?? ""})));
    return made;
}

// On a phone each row becomes a block in which the cells carry their heads.
function labelled(made, heads) {
    heads.forEach(([head], column) => made.children[column].dataset.head = head);
    return made;
}

function showNow(run) {
    const now = run.overview, last = column => run.history[column].findLast(value => value !== null) ?? null;
    place("run").textContent = document.title = run.run;
    place("state").textContent = `${STATES[run.state](run)}As of ${new Date(run.updated * 1000).toLocaleString()}.`;
    const speed = now?.samples_per_s === null ? `${now.reported_samples_per_s.toFixed(1)} claimed` : decimals(now?.samples_per_s ?? null, 1);
    const tiles = now ? [
        ["Step", `${count(now.step)} of ${count(now.total_steps)}`], ["Loss", decimals(now.loss, 3)],
        ["Held-out loss", decimals(now.heldout_loss, 3)], ["Participants", count(now.peers)],
        ["Samples/s", speed], ["Time left", duration(now.left_s)],
    ] : run.history.step.length ? [
        ["Step", `${count(run.state === "finished" ? run.total_steps : last("step"))} of ${count(run.total_steps)}`],
        ["Loss", decimals(last("loss"), 3)], ["Held-out loss", decimals(last("heldout_loss"), 3)],
    ] : [];
    place("tiles").replaceChildren(...tiles.map(([name, value]) => {
        const tile = document.createElement("div");
        tile.append(element("dt", name), element("dd", value));
        return tile;
    }));
    const faults = Object.entries(FAULTS).filter(([name]) => now?.counters[name]);
    place("faults").textContent = now ? "Faults, as the trainers present count them: " +
        (faults.map(([name, words]) => `${words} ${count(now.counters[name])}`).join(", ") || "none") + "." : "";
}

function showPictures({prompts, drawn}) {
    place("pictures").hidden = !drawn.length;
    const heads = ["", ...drawn.map(({step}) => `step ${count(step)}`)];
    const rows = prompts.map((prompt, number) => {
        const made = document.createElement("tr");
        made.append(element("th", prompt, {scope: "row"}));
        for (const {step, files} of drawn) {
            const picture = Object.assign(new Image(), {src: files[number], alt: `${prompt}, at step ${step}`, loading: "lazy"});
            made.append(element("td", picture));
        }
        return made;
    });
    place("gallery").replaceChildren(row(heads.map(text => [text]), "th"), ...rows);
}

function showBoard(run) {
    const {attested, peers, peers_in_all} = run;
    place("board").hidden = !peers.length;
    place("board-note").textContent = !peers.length ? "Nobody has given samples yet." : (attested
        ? "Samples and hours are what the run's helpers averaged into steps; hours are the time from step to step that a peer took part in. "
        : "No helper has averaged any of this yet: all of it is claimed. ") +
        `${count(peers_in_all)} peer${peers_in_all === 1 ? "" : "s"} gave ${count(run.samples_in_all)} samples; with what is not averaged yet, they claim ${count(run.claimed_in_all)}.` +
        (peers_in_all > peers.length ? ` The first ${peers.length} are shown.` : "");
    const heads = [["Peer"], ["Samples"], ["Share"], ["Hours"], ["Samples/s"], ["Claimed", "claimed"], ["Claimed/s", "claimed"]];
    place("board").replaceChildren(row(heads, "th"), ...peers.map(peer => labelled(row([
        [`${peer.name ?? "–"} (..${peer.peer.slice(-8)})`], [count(peer.samples)],
        [run.samples_in_all ? `${(100 * peer.samples / run.samples_in_all).toFixed(1)} %` : "–"], [peer.hours.toFixed(1)],
        [peer.present ? peer.samples_per_s.toFixed(1) : "away"],
        [count(peer.claimed_samples), "claimed"], [peer.present ? peer.claimed_samples_per_s.toFixed(1) : "", "claimed"],
    ]), heads)));
}

function showJoin(run) {
    place("line").textContent = `pip install 'dalle-lean[training]'\ndalle-lean join ${run.join}${run.admission === "invite" ? " --code CODE" : ""}`;
    place("admission").textContent = (ADMISSION[run.admission] ?? "") + (/ --data COPY$/.test(run.join) ? COPY : "");
    for (const id of ["method", "security"]) place(id).replaceChildren(...run[id].map(text => element("p", text)));
    place("needs").textContent = `${megabytes(run.needs.ram_bytes)} of free memory (${megabytes(run.needs.gpu_bytes)} on a GPU), a clock set by the network, and ${megabytes(run.needs.download_bytes)} to fetch the model's state at first:`;
    const link = place("prompt-page");
    link.hidden = !/^(https?:\/\/|draw\/$)/.test(run.prompt_page ?? "");
    if (!link.hidden) link.firstElementChild.href = run.prompt_page;
    place("model").hidden = !run.checkpoint && link.hidden;
    place("checkpoint").hidden = !run.checkpoint;
    if (!run.checkpoint) return;
    const {file, step, size_bytes, sha256} = run.checkpoint;
    Object.assign(place("download"), {href: file, textContent: `Download step ${count(step)}, ${megabytes(size_bytes)}`});
    place("sha256").textContent = sha256;
    place("draw").textContent = `unzip ${file}\ndalle-lean demo --model ${file.replace(/\.zip$/, "")}`;
}

function script(src) {
    return new Promise((resolve, reject) => document.head.append(Object.assign(
        document.createElement("script"), {src, async: false, onload: resolve, onerror: () => reject(new Error(src))})));
}

function makePlot(id) {
    const {x, lines, range} = PLOTS[id], timed = x === "time";
    const resolve = name => { place(id).style.color = `var(${name})`; return getComputedStyle(place(id)).color; };
    const [text, line] = [resolve("--quiet"), resolve("--line")];
    const source = new Bokeh.ColumnDataSource({data: {}});
    const figure = Bokeh.Plotting.figure({
        tools: "xbox_zoom,xpan,xzoom_in,xzoom_out,reset",
        x_axis_type: timed ? "datetime" : "linear", height: 240, sizing_mode: "stretch_width",
        background_fill_color: null, border_fill_color: null, outline_line_color: line,
        x_range: new Bokeh.DataRange1d(timed ? {
            range_padding: 5 * MINUTE_MS, range_padding_units: "absolute", default_span: 10 * MINUTE_MS, min_interval: 5 * MINUTE_MS,
        } : {}),
        y_range: new Bokeh.DataRange1d(range),
    });
    const zoom = figure.toolbar.tools.find(tool => tool.type === "BoxZoomTool");
    // With a finger, dragging scrolls the page.
    Object.assign(figure.toolbar, {logo: null, active_drag: matchMedia("(pointer: fine)").matches ? zoom : null});
    for (const axis of figure.axes) Object.assign(axis, {major_label_text_color: text, axis_line_color: line, major_tick_line_color: line, minor_tick_line_color: null});
    for (const grid of figure.grids) grid.grid_line_color = line;
    const [axis] = figure.below;
    axis.ticker.desired_num_ticks = place(id).clientWidth < 500 ? 3 : 6;
    Object.assign(axis.formatter, timed ? {...CLOCK, days: "%b %d", months: "%b %Y"} : {use_scientific: false});
    const glyphs = lines.map(([column, , shade]) => figure.line({field: x}, {field: column}, {source, line_width: 2, line_color: shade}));
    if (!timed) axis.ticker.min_interval = 1;
    for (const [column, , shade] of lines) figure.scatter({field: x}, {field: column}, {source, size: {field: "marker"}, fill_color: shade, line_color: null});
    const tooltips = [timed ? ["time", "@time{%F %H:%M}"] : ["step", "@step{0,0}"],
        ...lines.map(([column, name]) => [name, `@${column}{0,0.[000]}`])];
    figure.add_tools(new Bokeh.HoverTool({renderers: [glyphs[0]], mode: "vline", tooltips, formatters: {"@time": "datetime"}}));
    Bokeh.Plotting.show(figure, place(id));
    return source;
}

// A step may be looked at several times, and the median step of few trainers goes back at times: the last look counts.
function byStep(data) {
    const last = [...new Map(data.step.map((step, look) => [step, look]))].sort(([one], [other]) => one - other);
    return Object.fromEntries(Object.entries(data).map(([name, values]) => [name, last.map(([, look]) => values[look])]));
}

// Bokeh is loaded, and each plot drawn, when a plot comes into view: the rest of the page does not wait for it.
async function showPlots() {
    if (!shown || !inView.size) return;
    bokeh ??= Promise.all(["bokeh.js", "bokeh-api.js"].map(script));
    await bokeh;
    const history = shown.history, known = values => values.map(value => value ?? NaN);
    const local = ms => ms - 60000 * new Date(ms).getTimezoneOffset();  // Bokeh writes times as if in UTC
    let measured = NaN;
    const data = {...history, loss: known(history.loss), samples_per_s: known(history.samples_per_s),
        heldout_loss: history.heldout_loss.map(value => measured = value ?? measured),
        time: history.time.map(seconds => local(1000 * seconds))};
    for (const id of inView) drawn[id] ??= makePlot(id);
    for (const [id, source] of Object.entries(drawn)) {
        const points = PLOTS[id].x === "step" ? byStep(data) : data;
        source.data = {...points, marker: points.time.map(() => points.time.length < FEW_POINTS ? 7 : 0)};
    }
}

async function refresh() {
    try {
        const answer = await fetch("run.json", {cache: "no-cache"});
        if (!answer.ok) throw new Error(`the server answers ${answer.status}`);
        shown = await answer.json();
    } catch (error) {
        place("state").textContent = `The page could not be refreshed, perhaps because its host has ended: ${error.message}.`;
        return;
    }
    for (const show of [showNow, showBoard, showJoin]) show(shown);
    showPictures(shown.gallery);
    place("curves").hidden = !shown.history.step.length;
    document.body.dataset.ready = "yes";
    await showPlots();
}

const observer = new IntersectionObserver(entries => {
    for (const {target, isIntersecting} of entries) if (isIntersecting) inView.add(target.id);
    showPlots();
}, {rootMargin: "200px"});
for (const [id, {lines}] of Object.entries(PLOTS)) {
    observer.observe(place(id));
    const key = lines.length > 1 ? lines.map(([, name, shade]) => {
        const made = element("span", `━ ${name}`, {className: "key"});
        made.style.setProperty("--shade", shade);
        return made;
    }) : [];
    place(id).previousElementSibling.append(...key);
}
// Reloaded, not drawn again: Bokeh would keep the plots of the other colours.
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => location.reload());
place("copy").hidden = !navigator.clipboard;  // absent without HTTPS
place("copy").addEventListener("click", async () => {
    await navigator.clipboard.writeText(place("line").textContent);
    place("copy").textContent = "Copied";
});
refresh();
setInterval(refresh, REFRESH_MS);
