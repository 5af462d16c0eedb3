"""A host shows its run's progress from the donors' status files."""

import math
import threading

from training.swarm.host.status import RunStatus, StatusFile, read_status


def report(run_dir, name, **numbers):
    (run_dir / "status").mkdir(exist_ok=True)
    StatusFile(run_dir, name).update(**numbers)


def test_a_run_is_where_its_most_advanced_donor_is(tmp_path):
    report(tmp_path, "donor-0", step=3, trainers=1, heldout_loss=5.0, checkpoint=2, failed_saves=0)
    report(tmp_path, "donor-1", step=4, trainers=2, heldout_loss=4.25, checkpoint=0, failed_saves=1)
    status = RunStatus.of_peers(tmp_path, ["donor-0", "donor-1", "donor-2"])
    assert (status.step, status.trainers, status.checkpoint) == (4, 2, 0)
    assert status.note == "2 trainers, held-out loss 4.25, no checkpoint yet, 1 checkpoint could not be written"


def test_a_helper_of_another_hosts_run_knows_no_loss_and_no_checkpoint(tmp_path):
    report(tmp_path, "helper-0", step=7, trainers=1)
    status = RunStatus.of_peers(tmp_path, ["helper-0"])
    assert (status.step, status.heldout_loss, status.checkpoint) == (7, None, None)
    assert status.note == "1 trainer"


def test_a_loss_that_is_not_a_number_is_not_shown(tmp_path):
    report(tmp_path, "donor-0", step=1, trainers=1, heldout_loss=math.nan, checkpoint=1)
    assert read_status(tmp_path, "donor-0")["heldout_loss"] is None
    assert RunStatus.of_peers(tmp_path, ["donor-0"]).note == "1 trainer, checkpoint of step 1"


def test_before_any_report_the_run_is_at_its_beginning(tmp_path):
    assert RunStatus.of_peers(tmp_path, ["donor-0"]) == RunStatus()


def test_no_notice_is_lost_where_two_threads_give_theirs(tmp_path):
    status = StatusFile(tmp_path, "donor-0")
    (tmp_path / "status").mkdir()
    threads = [threading.Thread(target=lambda: [status.notice("x") for _ in range(100)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert status.content["noticed"] == 400


def test_a_log_on_a_full_disk_ends_no_peer(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise OSError(28, "No space left on device")

    (tmp_path / "status").write_text("no folder, so that the status cannot be written either")
    monkeypatch.setattr("builtins.print", refuse)
    StatusFile(tmp_path, "donor-0").notice("the checkpoint of step 20 could not be written")
