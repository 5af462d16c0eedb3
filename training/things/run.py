"""Training of a classifier of things, on drawings whose listing names what each one shows.

OUT gets classifier/ (a classifier folder), checkpoint/, metrics.jsonl, tensorboard/, and the things cropped from their
pictures in pictures.npy and heldout.npy.
"""

from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from dalle_lean.errors import UserError
from dalle_lean.images.image_folder import Line, Unusable
from dalle_lean.images.thing_classifier import READ_SIDE, ThingClassifier, picture_of_thing
from dalle_lean.optim.parameter_groups import parameter_groups
from dalle_lean.precision import autocast
from dalle_lean.progress import OnProgress
from training.data.augmentation import augment
from training.data.image_text import ImageTextPairs, read_captioned, read_picture
from training.data.picture_batches import shuffled_batches
from training.run.checkpoint import load_checkpoint
from training.run.draws import step_generator
from training.run.loop import TrainingRun
from training.run.progress import MeasuredProgress
from training.run.rates import cosine_rate
from training.step.guarded_step import guarded_step
from training.things.recipe import ThingRecipe


class ThingRun(TrainingRun[Tensor, MeasuredProgress]):
    """A run on the lines of `data` that name one thing. Random draws of step i follow from the seed and i alone.

    Args:
        heldout: a folder to measure on, ideally with drawings in other styles; None measures nothing.
    """

    def __init__(
        self,
        data: Path,
        out: Path,
        recipe: ThingRecipe,
        *,
        heldout: Path | None = None,
        device: str = "cpu",
        on_progress: OnProgress | None = None,
    ):
        self.out, self.result = out, out / "classifier" / "config.json"
        self.settings = self.recipe = recipe
        train_set = read_things(data, recipe.picture_side, on_progress, store=out / "pictures.npy")
        names = sorted({*train_set.captions})
        if len(names) < 2:
            raise UserError(f"{data} shows only {names[0]!r}; at least two things are needed")
        with torch.random.fork_rng():
            torch.manual_seed(recipe.seed)
            self.classifier = ThingClassifier(names, recipe.picture_side, device)
        self.heldout: ImageTextPairs | None = None
        if heldout is not None:
            found = read_things(heldout, recipe.picture_side, on_progress, store=out / "heldout.npy")
            known = [row for row, thing in enumerate(found.captions) if thing in self.classifier.row_of]
            if not known:
                raise UserError(f"{heldout} shows none of the {len(names)} things that are learnt; name another")
            self.heldout = found.take(known).subsample(recipe.heldout_pictures)
        self.pixels, self.labels = train_set.pixels, self.classifier.rows(train_set.captions)
        self.model = self.classifier.model
        self.optimizer = torch.optim.AdamW(parameter_groups(self.model, recipe.weight_decay))
        self.identity = {"recipe": recipe.identity(), "training pictures": train_set.digest()}
        saved = load_checkpoint(out, model=self.model, optimizer=self.optimizer, run=self.identity)
        among = {"right_thing_first": len(names)}
        self.progress = MeasuredProgress(**{**(saved or {"unusable": dict(train_set.skipped)}), "among": among})

    def batches(self, stopping: Callable[[], bool]) -> Generator[Tensor, None, None]:
        recipe, start = self.recipe, self.progress.step
        return shuffled_batches(len(self.pixels), recipe.batch_size, recipe.seed, start=start, steps=recipe.steps)

    def step(self, step: int, batch: Tensor) -> dict[str, float]:
        recipe, device = self.recipe, self.classifier.device
        generator = step_generator(recipe.seed, step)
        pixels = self.classifier.prepare(augment(self.pixels[batch].float(), generator))
        labels = self.labels[batch].to(device)

        def loss_of() -> Tensor:
            with autocast(device.type, recipe.precision):
                logits = self.model(pixels)
            return F.cross_entropy(logits.float(), labels, label_smoothing=recipe.label_smoothing)

        lr = cosine_rate(step, peak=recipe.lr, warmup_share=recipe.warmup_share, total_steps=recipe.steps)
        return guarded_step(self.model, self.optimizer, loss_of, lr=lr, clip_grad_norm=recipe.clip_grad_norm)

    def evaluate(self) -> None:
        if self.heldout is not None and self.due(self.settings.heldout_every):
            scores = self.classifier.scores_of_pixels(self.heldout.pixels[:])
            hits = scores.argmax(dim=1).cpu() == self.classifier.rows(self.heldout.captions)
            self.progress.measured = {"right_thing_first": hits.float().mean().item()}
            self.metrics.write(self.progress.step, **self.progress.measured)

    def write_result(self) -> None:
        self.classifier.save(self.out / "classifier")


def only_thing(entry: Line) -> str:
    """The only thing that a line of a listing names; raises Unusable if it does not name exactly one."""
    things = entry.get("things")
    if not isinstance(things, list) or not all(isinstance(thing, str) and thing.strip() for thing in things):
        raise Unusable("no things named")
    if len(things) != 1:
        raise Unusable("not exactly one thing")
    thing: str = things[0].strip()
    if not thing.isprintable():
        raise Unusable("a name that cannot be printed")
    return thing


def read_thing(folder: Path, name: str, side: int) -> Tensor:
    """Crop one picture to its thing: uint8 [3, side, side]."""
    pixels = read_picture(folder, name, READ_SIDE).permute(1, 2, 0).numpy()
    return picture_of_thing(Image.fromarray(pixels), side)


read_things = partial(read_captioned, label_of=only_thing, read=read_thing)
"""`read_captioned` of the pictures that show one thing each, cropped to it; captions are the names."""
