"""hivemind.Optimizer with limits: it raises errors where hivemind's retries forever or computes wrong results."""

import math
import time
from collections import Counter, deque
from typing import Any

import hivemind
from hivemind.optim.progress_tracker import ProgressTracker
from hivemind.p2p import PeerID
from hivemind.utils import get_dht_time

from dalle_lean.errors import UserError
from dalle_lean.progress import OnNotice
from dalle_lean.words import counted
from training.swarm.averaging.averagers import has_succeeded, stop_matchmaking
from training.swarm.averaging.gradient_averager import epoch_of_group, epoch_of_trainers
from training.swarm.averaging.state_averager import SwarmStateAverager
from training.swarm.averaging.state_validation import StateRefused
from training.swarm.optimizer.progress_tracker import DonorTracker, HelperTracker, SwarmTracker

RETRY_PAUSE_S = 2.0
KEPT_GROUPS = 100
SHOWN_MEMBERS = 30
LONE_CLAIM_ATTEMPTS = 2
"""To download a state that only one peer claims to exist."""
JOIN_AGAIN = "`dalle-lean join` takes the missing steps again"


class NoGroup(Exception):
    """A donor found no group to take a step with."""


class OutOfSync(UserError):
    """This peer is behind the others and could not download their state."""


class ProcessEnded(UserError):
    """The process of an averager or of the DHT has ended."""


class SwarmOptimizer(hivemind.Optimizer):
    """A peer's optimizer; created by training.swarm.optimizer.build.swarm_optimizer.

    Args:
        is_donor: contributes no samples but takes every step with the others.
        load_state_attempts: see TimingSection.
    """

    last_step_share = 0.1
    """How far a state of the last step that no donor signed may be from a donor's weights, relative to their norm, for
    each step that they miss, and at most the averager's `max_shift`. LAMB moves each tensor by its norm times the
    learning rate, which is 0.01 at most in our recipes."""
    scheduled_grads: Any
    scheduled_state: Any
    _should_check_synchronization_on_update: bool

    def __init__(self, *, is_donor: bool, load_state_attempts: int, on_notice: OnNotice, **options: Any):
        self.is_donor, self.load_state_attempts, self.on_notice = is_donor, load_state_attempts, on_notice
        self.resyncs = 0
        """Downloads of the state."""
        self.resyncs_in_row = 0
        """Downloads in a row, without a step with the others in between."""
        self.solo_steps = 0
        """Steps taken with this peer's gradients alone although others are, or were, there."""
        self.was_solo = False
        """Whether the last step was a solo step with others there."""
        self.had_company = False
        """Whether other peers were there at the last step."""
        self.groups: deque[frozenset[PeerID]] = deque(maxlen=KEPT_GROUPS)
        """The members of the latest groups in which this peer averaged gradients."""
        self.away_s = 0.0
        """How long a donor was away before it started; 0 once it has caught up with the trainers."""
        self.noticed: set[tuple[int, str]] = set()
        """The kinds of notices about the last step that a donor has given, by its own step."""
        super().__init__(**options)

    def _make_state_averager(self, **options: Any) -> SwarmStateAverager:
        return SwarmStateAverager(
            dht=self.dht,
            prefix=f"{self.run_id}_state_averager",
            min_matchmaking_time=self.matchmaking_time,
            allreduce_timeout=self.allreduce_timeout,
            next_chunk_timeout=self.next_chunk_timeout,
            auxiliary=self.auxiliary,
            start=True,
            **options,
        )

    def _make_gradient_averager(self, factory: Any, **options: Any) -> Any:
        averager = super()._make_gradient_averager(factory, **options)
        averager.current_epoch = lambda: None if self.auxiliary else self.local_epoch
        return averager

    def _make_progress_tracker(self, target_batch_size: int, **options: Any) -> ProgressTracker:
        kind = DonorTracker if self.is_donor else HelperTracker if self.auxiliary else SwarmTracker
        return kind(
            dht=self.dht,
            prefix=self.run_id,
            target_batch_size=target_batch_size,
            private_key=self.dht.private_key,
            start=True,
            **options,
        )

    def step(self, batch_size: int | None = None) -> None:
        """As in hivemind; also raises the exception of a failed background step, and ProcessEnded."""
        self.check_processes()
        # A helper has no weights, so it can jump. After a round it may be one step ahead of all records.
        if self.auxiliary and not 0 <= self.local_epoch - self.tracker.believed_epoch <= 1:
            with self.tracker.pause_updates():
                self.state_averager.local_epoch = int(self.tracker.believed_epoch)
                self.state_averager._update_scheduler()
                self.tracker.update_epoch(self.local_epoch)
        if self.auxiliary and self.tracker.believed_epoch >= self.tracker.last_epoch:
            return  # nobody looks for a group any more
        if self.was_solo:  # hivemind must compare with the others' progress after that step
            self.was_solo = False
            self.tracker.global_progress.next_fetch_time = get_dht_time()
            self.tracker.global_state_updated.set()
            self.tracker.fetched_global_progress_this_epoch.wait(self.matchmaking_time)
        super().step(batch_size=batch_size)
        if self.opt.failure is not None:
            raise self.opt.failure

    def check_processes(self) -> None:
        """ProcessEnded unless the processes that hivemind started are alive; a peer cannot take part without them."""
        for process in (self.dht, self.state_averager, self.grad_averager):
            if not process.is_alive():
                raise ProcessEnded(
                    f"{type(process).__name__}'s process ended with code {process.exitcode}; start again"
                )

    def _should_load_state_from_peers(self) -> bool:
        # If the donors' step is known, it decides: claims of others are not worth a download.
        if self.tracker.donor_epoch is None:
            return bool(super()._should_load_state_from_peers())
        due = self._should_check_synchronization_on_update and self.tracker.fetched_global_progress_this_epoch.is_set()
        if due:
            self._should_check_synchronization_on_update = False
        return bool(self.local_epoch < self.tracker.donor_epoch - (not due))

    def _update_global_epoch(self, grad_scaler: Any) -> None:
        if not self.auxiliary:
            self.state_averager.step(wait_for_delayed_updates=True)
            if self.tracker.confirmed_epoch > self.local_epoch:
                self.state_averager.stale = True  # the others took this step already
            # Without any samples, only the momentum would move the weights.
            self.opt.held = self.grad_averager.local_samples_accumulated == 0
        try:
            super()._update_global_epoch(grad_scaler)
        except NoGroup:  # the next group brings the others' step and weights
            if self.scheduled_state is not None:
                self.scheduled_state.cancel()
                self.scheduled_state = None
            if self.tracker.run_is_over and self.local_epoch < self.tracker.last_epoch:  # there is no next group
                self.fetch_last_state()
        self.resyncs_in_row = 0

    def _average_gradients_and_load_into_optimizer(self, maybe_step_control: Any) -> None:
        super()._average_gradients_and_load_into_optimizer(maybe_step_control)
        if maybe_step_control is None or not has_succeeded(maybe_step_control):
            return
        # A peer that is one step behind would stay behind: it looks for a group for a step that the others have taken,
        # and finds one when they look for the next.
        reported = maybe_step_control.result()
        self.groups.append(frozenset(reported))
        if self.is_donor:
            others = {peer: epoch for peer, epoch in reported.items() if peer != self.dht.peer_id}
            if any(epoch in (self.local_epoch, self.local_epoch + 1) for epoch in others.values()):
                self.away_s = 0.0
            epoch = epoch_of_trainers(others, self.local_epoch)
        else:
            epoch = min(epoch_of_group(reported, self.local_epoch, self.tracker.donors), self.tracker.believed_epoch)
        if self.local_epoch < epoch < self.tracker.last_epoch:
            self.state_averager.skip_to(epoch)

    def latest_members(self) -> list[str]:
        """Peer ids of the latest steps' members with their counts of rounds, most frequent first."""
        rounds = Counter(peer for group in self.groups for peer in group if peer != self.dht.peer_id)
        return [f"{peer.to_base58()} ({count})" for peer, count in rounds.most_common(SHOWN_MEMBERS)]

    def _load_local_gradients_into_optimizer(self) -> None:
        # hivemind would load the accumulators, which are already empty. The averager still holds this peer's gradients,
        # since no average has replaced them.
        if self.tracker.global_progress.num_peers > 1:
            self.was_solo = True
            if self.is_donor:
                raise NoGroup  # else forged records alone could advance the run to its end
            self.solo_steps += 1
            self.state_averager.stale = self.state_averager.skip_next_round = True
            self.state_averager.missed_steps += self.opt.held
        else:
            if self.had_company:
                self.on_notice("no other peers are left: training alone until they return")
            self.solo_steps += self.tracker.others_seen
            self.state_averager.mark_current()  # nobody has newer weights
        self.had_company = self.tracker.global_progress.num_peers > 1
        self.grad_averager.notify_used_averaged_gradients()

    def _load_averaged_gradients_into_optimizer_(self) -> None:
        self.opt.held, self.had_company = False, True
        super()._load_averaged_gradients_into_optimizer_()

    def load_state_from_peers(self) -> None:
        """As in hivemind, but with limits: OutOfSync after `load_state_attempts`.

        The same limit applies to downloads in a row after which this peer is behind again.
        """
        self.resyncs_in_row += 1
        if self.resyncs_in_row > self.load_state_attempts:
            raise OutOfSync(
                f"{self.position}: fetching the state took longer than a step of the others, "
                f"{self.load_state_attempts} times in a row; use a faster network connection"
            )
        if self.scheduled_grads is not None and not self.scheduled_grads.done():
            self._tag_along_with_zero_weight(self.scheduled_grads)
            self.scheduled_grads = None
        self.state_averager.step(wait_for_delayed_updates=True)
        with self.tracker.pause_updates():
            self.download_state()
            if not self.is_synchronized_with_peers() and self.tracker.relies_on_lone_claim:
                self.tracker.doubt_lone_claims()
            if not self.is_synchronized_with_peers():
                self.download_state()  # again, without the lone claim
            newest = self.tracker.confirmed_epoch if self.is_donor else self.tracker.global_epoch
            if self.local_epoch < newest:
                # The others have just moved on, or have no newer state: the next average brings their weights.
                self.state_averager.skip_to(newest)
                self.state_averager._update_scheduler()
            self.tracker.report_local_progress(local_epoch=self.local_epoch, samples_accumulated=0)
            self.grad_averager.reset_accumulated_grads_()
            if not self.client_mode:
                self.state_averager.state_sharing_priority = self.local_epoch

    @property
    def position(self) -> str:
        """This peer's step and the swarm's, in words."""
        return f"this peer is at step {self.local_epoch}, the swarm at {self.tracker.global_epoch}"

    def download_state(self) -> None:
        """Download and adopt a state within the allowed attempts; a donor that is alone keeps its own."""
        if self.is_donor and not self.state_averager.announced_donors():
            return
        self.on_notice(f"{self.position}: fetching the state")
        newest, lone = self.tracker.global_epoch, self.tracker.relies_on_lone_claim
        attempts = min(LONE_CLAIM_ATTEMPTS, self.load_state_attempts) if lone else self.load_state_attempts
        for attempt in range(1, attempts + 1):
            # On the first attempt, a donor may be about to take the newest step; later ones do not wait for it.
            min_epoch = max(self.local_epoch, newest if attempt == 1 else newest - 1)
            if lone and attempt == attempts:
                min_epoch = self.local_epoch + 1  # a state of other peers, if they are ahead too
            try:
                # A newcomer whose donor is offline cannot know the others' step.
                max_epoch = self.tracker.believed_epoch if self.local_epoch else math.inf
                signed = self.state_averager.load_state_from_peers(
                    timeout=self.load_state_timeout, min_epoch=min_epoch, max_epoch=max_epoch
                )
            except StateRefused as refusal:
                if attempt < attempts:
                    self.on_notice(f"attempt {attempt} of {attempts} to fetch the state failed ({refusal})")
                    time.sleep(RETRY_PAUSE_S * attempt)
                    continue
                if lone and self.can_ignore_lone_claim():
                    self.on_notice(
                        f"only one peer claims step {newest}, and nobody serves its state: ignored ({refusal})"
                    )
                elif self.is_donor:
                    self.on_notice(f"nobody serves a valid state: continuing with older weights ({refusal})")
                else:
                    raise OutOfSync(
                        f"{self.position}, and no state could be downloaded in {attempt} attempts ({refusal}); "
                        "run the same command again later"
                    ) from None
            else:
                self.resyncs += 1
                judged = "" if signed else "; no donor signed it, only its held-out loss was checked"
                self.on_notice(f"fetched the state of step {self.local_epoch}{judged}")
                return

    def fetch_last_state(self) -> None:
        """For a donor that is behind most trainers, which have taken the last step: take that step's state from one of
        them, which stays for that, if there is a valid one.

        A donor that was there all the time can have missed one step only, and one that was away no more than one a
        second: else a single trainer's claim could end the run at any time.
        """
        last = self.tracker.last_epoch
        missed = last - self.local_epoch
        where = f"this peer is at step {self.local_epoch}, and most trainers are at the last one, {last}"
        if missed > max(1.0, self.away_s):
            self.notice_once(
                "too many",
                f"{where}; their state is not taken, as this peer was not away for long enough to miss "
                f"{counted(missed, 'step')}: {JOIN_AGAIN}",
            )
            return
        self.notice_once("fetching", f"{where}: fetching their state")
        share = self.last_step_share * (last - self.state_averager.state_epoch)
        with self.tracker.pause_updates():
            try:
                self.state_averager.load_state_from_peers(
                    self.load_state_timeout,
                    min_epoch=last,
                    max_epoch=last,
                    each_s=self.load_state_timeout / 2,  # a peer that sends slowly leaves time for another
                    unsigned_share=min(share, self.state_averager.max_shift),
                )
            except StateRefused as refusal:
                self.notice_once("refused", f"{where}, but no state of it could be fetched ({refusal}): {JOIN_AGAIN}")
                return
            if self.scheduled_grads is not None:
                self.scheduled_grads.cancel()
                self.scheduled_grads = None
            self.resyncs += 1
            self.on_notice(f"fetched the state of the last step; this peer had missed {counted(missed, 'step')}")
            self.tracker.update_epoch(last)
            if not self.client_mode:
                self.state_averager.state_sharing_priority = last

    def notice_once(self, kind: str, line: str) -> None:
        """The first notice of its kind at a step, about what is tried again and again."""
        if (self.local_epoch, kind) not in self.noticed:
            self.noticed.add((self.local_epoch, kind))
            self.on_notice(line)

    def can_ignore_lone_claim(self) -> bool:
        """Ignore lone claims from now on; returns whether the swarm's step is known without them.

        At step 0 a donor must confirm that the run is there, as newcomers are at step 0 in any run.
        """
        if self.tracker.doubt_lone_claims() > 0:
            return True
        try:
            self.state_averager.load_state_from_peers(timeout=self.load_state_timeout, min_epoch=0, donors_only=True)
        except StateRefused:
            return False
        return True

    def stop_matchmaking(self) -> None:
        """Stop looking for groups, which nobody else does after the last step; a running all-reduce continues."""
        stop_matchmaking(self.scheduled_grads)
        stop_matchmaking(self.state_averager.latest_round)

    def shutdown(self) -> None:
        """Leave the swarm, after a running all-reduce at most."""
        stop_matchmaking(self.state_averager.latest_round)
        # hivemind would cancel a second time what is cancelled already, and fail.
        if self.scheduled_grads is not None and self.scheduled_grads.done():
            self.scheduled_grads = None
        super().shutdown()
