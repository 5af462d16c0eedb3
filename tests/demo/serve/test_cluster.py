"""Models replaced and uploads turned away, without a cluster."""

import asyncio
from types import SimpleNamespace

import pytest

pytest.importorskip("ray.serve", reason="pip install 'dalle-lean[serve]'")

import ray
from ray import serve

from dalle_lean.errors import UserError
from demo.serve import cluster
from demo.serve.drawer import own_gpu
from demo.serve.front import DRAWERS, FRONT, Front
from demo.service.drawing_service import UPLOADS_WAITING
from demo.service.scheduler import Busy


def failing(call, *errors):
    """The call, except that its first uses raise these errors; None lets a use pass."""
    left = list(errors)

    def attempt(*given, **options):
        if left and (error := left.pop(0)) is not None:
            raise error
        return call(*given, **options)

    return attempt


@pytest.mark.parametrize("dead", [False, True])
def test_a_model_that_the_front_never_switches_to_is_removed_again_and_an_error(model_folder, monkeypatch, dead):
    old, deleted = f"{DRAWERS}old", []

    def result(timeout_s):
        if dead:
            raise TimeoutError
        return old, {old: 0}

    in_use = SimpleNamespace(remote=lambda: SimpleNamespace(result=result))
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 1})
    monkeypatch.setattr(serve, "run", lambda *given, **options: None)
    monkeypatch.setattr(serve, "delete", deleted.append)
    monkeypatch.setattr(serve, "status", lambda: SimpleNamespace(applications={FRONT: None}))
    monkeypatch.setattr(serve, "get_app_handle", lambda name: SimpleNamespace(in_use=in_use))
    monkeypatch.setattr(cluster, "SWITCH_S", 0.0)
    engine = cluster.RunningEngine(cluster.EngineSettings())
    with pytest.raises(ValueError, match=f"did not switch to {model_folder} in 0 s"):
        engine.load(model_folder)
    [removed] = deleted
    assert removed.startswith(DRAWERS)
    assert removed != old


def test_a_previous_model_is_removed_once_idle_though_a_restarted_front_does_not_know_it(model_folder, monkeypatch):
    """And though any call fails once, the front's when it is too late to switch."""
    forgotten, drawing = f"{DRAWERS}forgotten", f"{DRAWERS}drawing"
    running = {FRONT: None, forgotten: None, drawing: None}
    prompts, deleted = {drawing: 1}, []

    def result(timeout_s):
        *_, newest = running
        if forgotten not in running:
            prompts.clear()
        return newest, {newest: 2, **prompts}

    def delete(name):
        assert name not in prompts
        deleted.append(name)
        del running[name]

    def status():
        return SimpleNamespace(applications=running)

    answer = failing(result, None, TimeoutError())
    in_use = SimpleNamespace(remote=lambda: SimpleNamespace(result=answer))
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 1})
    monkeypatch.setattr(serve, "run", lambda drawers, name, route_prefix: running.update({name: None}))
    monkeypatch.setattr(serve, "delete", failing(delete, TimeoutError()))
    monkeypatch.setattr(serve, "status", failing(status, None, ray.exceptions.RayError()))
    monkeypatch.setattr(serve, "get_app_handle", lambda name: SimpleNamespace(in_use=in_use))
    monkeypatch.setattr(cluster, "DRAIN_POLL_S", 0.0)
    monkeypatch.setattr(cluster, "SWITCH_S", 0.0)
    cluster.RunningEngine(cluster.EngineSettings()).load(model_folder)
    assert deleted == [forgotten, drawing]
    assert len(running) == 2


@pytest.mark.parametrize("device", ["gpu", "cuda:1"])
def test_a_device_that_the_engine_cannot_choose_is_refused(device):
    with pytest.raises(UserError, match=f"--device {device}: choose auto, cpu or cuda"):
        cluster.EngineSettings(device=device)


def test_the_replicas_of_a_machine_take_its_gpus_in_turn(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    taken = []
    for local_rank in range(4):
        context = SimpleNamespace(rank=SimpleNamespace(local_rank=local_rank))
        monkeypatch.setattr(serve, "get_replica_context", lambda context=context: context)
        taken.append(own_gpu())
    assert taken == ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]


def test_a_replica_sees_all_gpus_and_asks_for_half_of_its_share(monkeypatch, tmp_path):
    options = {}
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 8, "GPU": 4})
    deployment = SimpleNamespace(bind=lambda *where: where)
    monkeypatch.setattr(serve, "deployment", lambda _, **given: options.update(given) or deployment)
    engine = cluster.RunningEngine(cluster.EngineSettings(replicas=4))
    assert engine.drawers(tmp_path, "a" * 64)[2] == "cuda"
    asked = options["ray_actor_options"]
    assert asked["num_gpus"] == 0.5
    assert asked["runtime_env"] == {"env_vars": {cluster.SEE_ALL_GPUS: "1"}}


def test_one_upload_is_read_three_wait_and_the_next_is_turned_away(monkeypatch):
    async def wait(*given):
        await asyncio.Event().wait()

    monkeypatch.setattr(Front, "watch", wait)
    monkeypatch.setattr("demo.serve.front.body", lambda message, most_bytes: asyncio.sleep(0, b"rgb"))
    model = SimpleNamespace(picture_bytes=3, handle=SimpleNamespace(read=SimpleNamespace(remote=wait)))

    async def visit():
        front = Front(1, 1, 1)
        uploads = [asyncio.create_task(front.read(None, model)) for _ in range(2 + UPLOADS_WAITING)]
        done, waiting = await asyncio.wait(uploads, return_when=asyncio.FIRST_EXCEPTION, timeout=30)
        for task in (front.watching, *waiting):
            task.cancel()
        return [task.exception() for task in done], len(waiting)

    [busy], waiting = asyncio.run(visit())
    assert waiting == 1 + UPLOADS_WAITING
    assert isinstance(busy, Busy)
    assert (busy.served, busy.waiting) == (1, UPLOADS_WAITING)
