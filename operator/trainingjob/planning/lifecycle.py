"""The life of a job: from what is wanted and what is seen to the next status and actions.

`plan` is a pure function, called again and again (level-triggered). The status is the only
memory: the engine writes it before it carries out the actions, so that an operator that dies in
between finds its intentions in the next life, and repeats the actions, which are idempotent.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from trainingjob.api.job import TrainingJob
from trainingjob.api.status import (
    Attempt,
    ClusterStatus,
    Outcome,
    Phase,
    TrainingJobStatus,
    WorkersStatus,
)
from trainingjob.planning import actions as act
from trainingjob.planning import budgets, conditions, history, names
from trainingjob.planning.catalogue import Catalogue
from trainingjob.planning.failures import Verdict, judge
from trainingjob.planning.observed import Cluster, Driver, DriverState, Observed
from trainingjob.planning.raycluster import check
from trainingjob.planning.sizing import Sizing, size
from trainingjob.planning.unfit import Unfit

STOP_GRACE_SECONDS = 60
"""How long a driver may take to write its checkpoint when it is asked to stop."""
DELETION_BOUND_SECONDS = STOP_GRACE_SECONDS + 30
"""After this a deleted job is let go, whatever Ray or KubeRay answer."""
UNREACHABLE_SECONDS = 300
"""How long a dashboard that used to answer may be silent before its cluster is given up."""
PENDING_SECONDS = 60
"""How long Ray may take to start a driver that needs no runtime environment."""
UNCONFIRMED_HEAD_SECONDS = 60
"""How long to wait for a head that cannot be confirmed dead, after its pod was deleted."""
FAILURES_PER_CLUSTER = 3
"""Infrastructure failures after which the cluster itself is suspected, and replaced."""


@dataclass(frozen=True)
class Plan:
    """The next status, what to do once it is written, and when to look again at the latest."""

    status: TrainingJobStatus
    actions: tuple[act.Action, ...]
    requeue_after: float | None


def plan(job: TrainingJob, seen: Observed, now: datetime, catalogue: Catalogue) -> Plan:
    """The next step in the life of `job`, given what is seen at `now` (UTC, whole seconds)."""
    return _Step(job, seen, now, catalogue).run()


def refused(job: TrainingJob, message: str, now: datetime) -> TrainingJobStatus:
    """The status of a job for which the API server refused a write, in its own words."""
    status = job.status.model_copy(update={"message": message})
    return conditions.derive(
        status, job.metadata.generation, now, trouble=("Refused", message), stalled=None
    )


def submission_refused(job: TrainingJob, message: str, now: datetime) -> TrainingJobStatus:
    """The status of a job whose submission Ray refuses: the next one could only fare the same."""
    step = _Step(job, Observed(), now, Catalogue())
    step.refuse_submission(message)
    return step.finish().status


class _Step:
    def __init__(
        self, job: TrainingJob, seen: Observed, now: datetime, catalogue: Catalogue
    ) -> None:
        self.job, self.spec, self.seen, self.now = job, job.spec, seen, now
        self.status = job.status
        self.actions: list[act.Action] = []
        self.requeue: float | None = None
        self.trouble: tuple[str, str] | None = None
        self.stalled: tuple[str, str] | None = None
        self.unreachable = False
        self.sizing: Sizing | None = None
        self.unfit: Unfit | None = None
        try:
            self.sizing = size(self.spec.workers, catalogue, self.spec.spot.policy)
            if job.status.cluster is None:
                check(job, self.sizing, catalogue)
        except Unfit as error:
            self.unfit = error

    # -- bookkeeping ---------------------------------------------------------------------------

    def run(self) -> Plan:
        self._set(observed_generation=self.job.metadata.generation)
        self._track()
        if self.job.metadata.deletion_timestamp:
            self._delete()
        elif self.status.phase.final:
            self._after_end()
        else:
            self._live()
        return self.finish()

    def finish(self) -> Plan:
        before = self.job.status.phase
        if self.status.phase != before:
            kind = "Warning" if self.status.phase is Phase.FAILED else "Normal"
            self._announce(kind, str(self.status.phase), self.status.message)
        elif self.trouble and not self._known_trouble(self.trouble[0]):
            self._announce("Warning", *self.trouble)
        status = conditions.derive(
            self.status,
            self.job.metadata.generation,
            self.now,
            trouble=self.trouble,
            stalled=self.stalled,
            unreachable=self.unreachable,
        )
        # Events go last: what they tell of is then done.
        ordered = sorted(self.actions, key=lambda a: isinstance(a, act.Announce))
        return Plan(status, tuple(ordered), self.requeue)

    def _known_trouble(self, reason: str) -> bool:
        return any(c.reason == reason for c in self.job.status.conditions)

    def _set(self, **fields: Any) -> None:
        self.status = self.status.model_copy(update=fields)

    def _set_cluster(self, **fields: Any) -> None:
        assert self.status.cluster is not None
        self._set(cluster=self.status.cluster.model_copy(update=fields))

    def _do(self, action: act.Action) -> None:
        self.actions.append(action)

    def _announce(self, kind: str, reason: str, message: str) -> None:
        self._do(act.Announce(kind, reason, message[:1000]))

    def _again(self, seconds: float) -> None:
        self.requeue = seconds if self.requeue is None else min(self.requeue, seconds)

    def _phase(self, phase: Phase, message: str) -> None:
        self._set(phase=phase, message=message)

    @property
    def attempt(self) -> Attempt | None:
        """The attempt under way."""
        return history.under_way(self.status)

    def _track(self) -> None:
        """Takes over what is seen, before anything is decided."""
        cluster, known = self.seen.cluster, self.status.cluster
        if cluster and known and self.sizing:
            pods, ready = self.sizing.pods, cluster.workers_ready
            workers = WorkersStatus(
                desired=pods, ready=ready, gpus=ready * self.sizing.gpus_per_pod
            )
            self._set(workers=workers, worker_summary=f"{ready}/{pods}")
            if ready >= pods:
                if not known.workers_ready_time:
                    self._set_cluster(workers_ready_time=self.now)
                if self.attempt and self.attempt.accepted:
                    self.status = history.amend(self.status, workers_ready=True)
            head = cluster.head
            if head and not known.head_pod_uid and self.seen.ray.reachable:
                self._set_cluster(head_pod_uid=head.uid, dashboard_url=cluster.address)
        training = self.seen.training
        if training and self.attempt:
            told = training.model_dump(exclude_none=True)
            merged = (self.status.training or training).model_copy(update=told)
            self._set(training=merged, progress=_progress(merged.step, merged.total_steps))
            self.status = history.amend(
                self.status,
                last_step=merged.step,
                start_step=training.resumed_from_step
                if training.resumed_from_step is not None
                else self.attempt.start_step,
            )

    # -- a job that is neither ended nor being deleted -------------------------------------------

    def _live(self) -> None:
        if self.status.ending_reason:
            self._end_after_stop(self.status.ending_reason, self.status.message)
            return
        if self.spec.suspend:
            self._suspend()
            return
        if self.status.active_since is None:
            self._set(active_since=self.now)
        if self.unfit:
            self.stalled = (self.unfit.reason, str(self.unfit))
            self._set(message=str(self.unfit))
            return
        limit = self.spec.deadlines.total_seconds
        if limit is not None:
            left = limit - self._active_seconds()
            if left <= 0:
                self._end_after_stop(
                    "TotalDeadlineExceeded",
                    f"the job has run for its deadlines.totalSeconds ({limit} s)",
                )
                return
            self._again(left)
        if self.status.cluster is None:
            self._new_cluster()
            return
        self._hold()
        if self.seen.cluster is None:
            self._cluster_absent()
        else:
            self._with_cluster(self.seen.cluster)

    def _active_seconds(self) -> float:
        since = self.status.active_since
        return self.status.active_seconds + ((self.now - since).total_seconds() if since else 0.0)

    def _hold(self) -> None:
        """Before anything exists that a deletion would have to wait for."""
        if names.FINALIZER not in self.job.metadata.finalizers:
            self._do(act.AddFinalizer())

    def _new_cluster(self) -> None:
        if self._removing_clusters():
            if self.status.phase in (Phase.PENDING, Phase.SUSPENDED):
                self._phase(Phase.PROVISIONING, "waiting for the previous cluster to be gone")
            return
        if self._waiting_for_retry():
            return
        generation = self.status.clusters + 1
        name = names.cluster(self.job.metadata, generation)
        self._hold()
        self._set(
            cluster=ClusterStatus(name=name, generation=generation, created_time=self.now),
            clusters=generation,
            start_time=self.status.start_time or self.now,
            retry_time=None,
            stop_requested_time=None,
        )
        last = self.status.attempts[-1] if self.status.attempts else None
        anew = last is None or last.outcome is Outcome.STOPPED
        phase = Phase.PROVISIONING if anew else Phase.RECOVERING
        self._phase(phase, f"creating Ray cluster {name}")
        self._do(act.EnsureCluster(name, generation))
        self._again(5)

    def _cluster_absent(self) -> None:
        cluster = self.status.cluster
        assert cluster is not None
        if cluster.head_pod_uid or self.attempt:
            self._lost("ClusterLost", f"Ray cluster {cluster.name} was deleted")
        else:
            self._do(act.EnsureCluster(cluster.name, cluster.generation))
            self._again(2)

    def _with_cluster(self, cluster: Cluster) -> None:
        known = self.status.cluster
        assert known is not None
        for pod in cluster.dead_pods:
            self._do(act.DeletePod(pod.name, pod.uid))
            self._announce(
                "Warning",
                "NodeLost",
                f"node {pod.node} is gone or does not answer: deleting pod {pod.name}, so that "
                "it is replaced at once",
            )
        if cluster.deleting:
            self._lost("ClusterLost", f"Ray cluster {cluster.name} was deleted")
            return
        if cluster.lost_fields:
            lost = ", ".join(cluster.lost_fields)
            message = (
                f"the API server did not store {lost} of RayCluster {cluster.name}: the installed "
                "KubeRay CRD is too old, or a webhook removes it; upgrade KubeRay"
            )
            self.stalled = ("FieldsLost", message)
            self._set(message=message)
            self._again(60)
            return
        head = cluster.head
        if known.head_pod_uid:
            if head is None or head.uid != known.head_pod_uid:
                self._lost("HeadLost", "the head is gone")
                return
            if head.unreachable:
                self._lost(
                    "HeadLost",
                    f"the head's node {head.node} does not answer; it is assumed dead "
                    f"{UNCONFIRMED_HEAD_SECONDS} s after its pod is deleted",
                    wait=UNCONFIRMED_HEAD_SECONDS,
                )
                return
        if head is None and known.workers_ready_time:
            # KubeRay replaces no head once all pods have been ready.
            self._lost("HeadLost", "the head is gone")
            return
        if head and head.ended:
            self._lost("HeadLost", f"the head ended: {head.reason or 'unknown reason'}")
            return
        provisioned = known.workers_ready_time and known.head_pod_uid
        if not provisioned and self._provisioning_overdue(cluster):
            return
        if cluster.troubles:
            first = cluster.troubles[0]
            self.trouble = (first.reason, first.message)
        self._fall_back(cluster)
        if not self.seen.ray.reachable:
            self._without_dashboard(cluster)
        elif self.attempt is None:
            self._next_attempt()
        else:
            self._follow(self.seen.ray.driver)

    def _provisioning_overdue(self, cluster: Cluster) -> bool:
        assert self.status.cluster is not None
        limit = self.spec.deadlines.provisioning_seconds
        left = limit - (self.now - self.status.cluster.created_time).total_seconds()
        if left > 0:
            self._again(left)
            return False
        cause = "; ".join(t.message for t in cluster.troubles[:2]) or (
            f"{cluster.workers_ready} of {self.sizing.pods if self.sizing else 0} workers ready"
        )
        self._end_after_stop(
            "ProvisioningDeadlineExceeded",
            f"the workers were not ready within deadlines.provisioningSeconds ({limit} s): {cause}",
        )
        return True

    def _fall_back(self, cluster: Cluster) -> None:
        known = self.status.cluster
        assert known is not None
        waited = cluster.spot_unschedulable_seconds
        if self.spec.spot.policy != "Prefer" or not waited or not self.sizing:
            return
        if self.sizing.on_demand is None:
            return
        left = self.spec.spot.fallback_after_seconds - waited
        if left > 0 and not known.on_demand:
            self._again(left)
            return
        if not known.on_demand:
            self._set_cluster(on_demand=True)
            self._announce("Normal", "FallBackToOnDemand", f"no spot capacity for {int(waited)} s")
        self._do(act.FallBackToOnDemand(cluster.name))

    def _without_dashboard(self, cluster: Cluster) -> None:
        known = self.status.cluster
        assert known is not None
        if not known.head_pod_uid:
            if self.status.phase is not Phase.RECOVERING:
                message = self.trouble[1] if self.trouble else "waiting for the head"
                self._phase(Phase.PROVISIONING, message)
            self._again(0.2 if cluster.address else 5)
            return
        # Unknown is not failed: the driver may well be running.
        self.unreachable = True
        since = conditions.unreachable_since(self.status) or self.now
        left = UNREACHABLE_SECONDS - (self.now - since).total_seconds()
        if left <= 0:
            self._lost(
                "DashboardUnreachable",
                f"the Ray dashboard has not answered for {UNREACHABLE_SECONDS} s: "
                f"{self.seen.ray.error}",
            )
            return
        self._again(min(left, 2))

    # -- attempts ----------------------------------------------------------------------------------

    def _waiting_for_retry(self) -> bool:
        due = self.status.retry_time
        if due is None or due <= self.now:
            return False
        self._again((due - self.now).total_seconds())
        return True

    def _all_ready(self) -> bool:
        workers = self.status.workers
        return workers is not None and workers.ready >= workers.desired

    def _next_attempt(self) -> None:
        assert self.status.cluster is not None
        if self._waiting_for_retry():
            return
        last = self.status.attempts[-1] if self.status.attempts else None
        here = last is not None and last.cluster == self.status.cluster.name
        if last and here and last.outcome is Outcome.NOT_CHARGED and not self._all_ready():
            message = self.trouble[1] if self.trouble else "waiting for all workers"
            self._phase(Phase.RECOVERING, message)
            self._again(5)
            return
        resumed = last is not None and last.outcome is Outcome.STOPPED
        number = self.status.attempt if resumed else self.status.attempt + 1
        submission = names.submission(self.job.metadata, self.status.submissions + 1)
        training = self.status.training
        attempt = Attempt(
            attempt=number,
            cluster=self.status.cluster.name,
            submission_id=submission,
            start_time=self.now,
            start_step=training.checkpoint_step if training else None,
        )
        self.status = history.begin(self.status, attempt)
        self._set(retry_time=None, stop_requested_time=None)
        phase = Phase.RECOVERING if self.status.phase is Phase.RECOVERING else Phase.STARTING
        self._phase(phase, f"starting attempt {number}")
        self._do(act.Submit(submission, number))
        self._again(0.5)

    def _follow(self, driver: Driver | None) -> None:
        attempt = self.attempt
        assert attempt is not None
        age = (self.now - attempt.start_time).total_seconds()
        if driver is None:
            if attempt.accepted:
                self._lost("DriverLost", "Ray no longer knows the driver")
            else:
                self._do(act.Submit(attempt.submission_id, attempt.attempt))
                self._again(1)
            return
        if not attempt.accepted:
            head = self.seen.cluster.head if self.seen.cluster else None
            self.status = history.amend(
                self.status,
                accepted=True,
                node=head.node if head else None,
                workers_ready=self._all_ready(),
            )
        if driver.state.ended:
            self._ended(driver)
        elif driver.state is DriverState.PENDING:
            limit = (
                self.spec.deadlines.provisioning_seconds
                if self.spec.runtime_env
                else PENDING_SECONDS
            )
            if age > limit:
                # Ray cannot stop a driver that it has not started (POST …/stop does nothing), and
                # it might start it yet: only the end of the head is sure to prevent that.
                self._lost("SubmissionStuck", f"Ray did not start the driver within {limit} s")
                return
            self._again(1)
        else:
            self._running(attempt, age)

    def _running(self, attempt: Attempt, age: float) -> None:
        if self._all_ready():
            training = self.status.training
            step = training.step if training and self.seen.training else None
            if self.status.phase is not Phase.RECOVERING or step or age > 30:
                self._phase(Phase.RUNNING, f"attempt {attempt.attempt} is running")
        elif self.status.phase is not Phase.RECOVERING:
            workers = self.status.workers or WorkersStatus()
            self._phase(
                Phase.STARTING,
                self.trouble[1]
                if self.trouble
                else f"{workers.ready} of {workers.desired} workers ready",
            )
        self._again(min(10.0, max(1.0, age / 20)))

    def _ended(self, driver: Driver) -> None:
        attempt = self.attempt
        assert attempt is not None
        if driver.state is DriverState.SUCCEEDED:
            self._close(Verdict(Outcome.SUCCEEDED, "Succeeded", ""), driver.exit_code)
            self._end(Phase.SUCCEEDED, f"attempt {attempt.attempt} succeeded")
            return
        stopped = self.status.stop_requested_time is not None
        verdict = judge(driver, self.seen.log, stop_requested=stopped)
        if (
            not attempt.workers_ready
            and verdict.retry
            and verdict.outcome in (Outcome.USER_FAILURE, Outcome.INFRASTRUCTURE_FAILURE)
        ):
            verdict = Verdict(
                Outcome.NOT_CHARGED,
                "WorkersNotReady",
                f"the driver ended before all workers were ready: {verdict.message}",
            )
        self._recover(verdict, driver.exit_code)

    def refuse_submission(self, message: str) -> None:
        """Ends the job, since Ray does not take what it would submit."""
        verdict = Verdict(
            Outcome.USER_FAILURE,
            "SubmissionRefused",
            f"Ray refuses the submission: {message}; correct spec.entrypoint or spec.runtimeEnv",
            retry=False,
        )
        self._recover(verdict, None)

    def _lost(self, reason: str, message: str, wait: float = 0) -> None:
        """The cluster is lost, and with it what ran on it."""
        verdict = Verdict(Outcome.INFRASTRUCTURE_FAILURE, reason, message, new_cluster=True)
        if self.status.stop_requested_time:
            verdict = Verdict(Outcome.STOPPED, reason, message, new_cluster=True)
        self._recover(verdict, None, wait)

    def _close(self, verdict: Verdict, exit_code: int | None = None) -> None:
        """Writes the end of the attempt under way into the history."""
        self.status = history.end(self.status, verdict, exit_code, self.seen.log, self.now)

    def _recover(self, verdict: Verdict, exit_code: int | None, wait: float = 0) -> None:
        """Ends the attempt, charges it, and decides what comes next."""
        number = self.status.attempt
        policy, outcome = self.spec.failure_policy, verdict.outcome
        self.status = budgets.charge(self.status, policy, outcome)
        self._close(verdict, exit_code)
        spent = budgets.spent(self.status, policy, outcome)
        if spent or not verdict.retry:
            message = f"{verdict.message} ({spent})" if spent else verdict.message
            self._end(Phase.FAILED, message, reason=verdict.reason)
            return
        delay = max(wait, budgets.backoff(self.job, self.status, outcome))
        self._set(
            retry_time=self.now + timedelta(seconds=round(delay)) if delay else None,
            stop_requested_time=None,
        )
        cluster = self.status.cluster
        if cluster:
            failures = cluster.failures + (outcome is Outcome.INFRASTRUCTURE_FAILURE)
            self._set_cluster(failures=failures)
            if verdict.new_cluster or failures >= FAILURES_PER_CLUSTER:
                self._set(cluster=None)
                self._do(act.DeleteCluster(cluster.name))
        then = f"next attempt in {round(delay)} s" if delay else "next attempt now"
        self._phase(Phase.RECOVERING, f"attempt {number}: {verdict.message}; {then}")
        self._announce("Warning", verdict.reason, self.status.message)
        # At once where the cluster stays, so that a crashed driver is back in a second.
        self._again(max(delay, 1.0 if self.status.cluster is None else 0.0))

    # -- ends --------------------------------------------------------------------------------------

    def _end(self, phase: Phase, message: str, reason: str = "") -> None:
        self._phase(phase, message)
        if reason:
            self.stalled = (reason, message)
        since = self.status.active_since
        self._set(
            completion_time=self.now,
            ending_reason="",
            retry_time=None,
            cluster=None,
            active_seconds=int(self._active_seconds()) if since else self.status.active_seconds,
            active_since=None,
        )
        self._removing_clusters()
        self._again(1)

    def _removing_clusters(self) -> bool:
        """Deletes every cluster of the job that is still there; True while there are any."""
        present = list(self.seen.others)
        if self.seen.cluster:
            present.append(self.seen.cluster.name)
            for pod in self.seen.cluster.dead_pods:
                self._do(act.DeletePod(pod.name, pod.uid))
        for name in present:
            if act.DeleteCluster(name) not in self.actions:
                self._do(act.DeleteCluster(name))
            self._again(1)
        return bool(present)

    def _after_end(self) -> None:
        if self._removing_clusters():
            return
        if names.FINALIZER in self.job.metadata.finalizers:
            self._do(act.RemoveFinalizer())
        ttl, ended = self.spec.cleanup.ttl_seconds_after_finished, self.status.completion_time
        if ttl is not None and ended is not None:
            left = ttl - (self.now - ended).total_seconds()
            if left <= 0:
                self._do(act.DeleteJob())
            else:
                self._again(left)

    def _delete(self) -> None:
        if names.FINALIZER not in self.job.metadata.finalizers:
            return
        self._set(message="stopping, since the job is being deleted")
        gone = self._wound_down()
        asked = self.status.stop_requested_time or self.now
        overdue = (self.now - asked).total_seconds() >= DELETION_BOUND_SECONDS
        if gone or overdue:
            self._do(act.RemoveFinalizer())

    def _suspend(self) -> None:
        if self.status.phase is Phase.SUSPENDED and self.status.cluster is None:
            self._removing_clusters()
            return
        self._set(message="stopping at a checkpoint, since spec.suspend is true")
        if self._wound_down():
            self._set(
                active_seconds=int(self._active_seconds()),
                active_since=None,
                stop_requested_time=None,
                cluster=None,
                retry_time=None,
                workers=None,
                worker_summary="",
            )
            self._phase(Phase.SUSPENDED, "suspended; set spec.suspend to false to go on")

    def _end_after_stop(self, reason: str, message: str) -> None:
        self._set(message=message, ending_reason=reason)
        if self._wound_down():
            self._end(Phase.FAILED, message, reason=reason)

    def _wound_down(self) -> bool:
        """Stops the driver gracefully, then deletes the cluster; True when it is gone, or when
        the driver turned out to have succeeded and the job has ended with it."""
        driver, cluster = self.seen.ray.driver, self.seen.cluster
        if self.attempt and driver and driver.state is DriverState.SUCCEEDED:
            if not self.job.metadata.deletion_timestamp:
                self._ended(driver)
                return False
            self._close(Verdict(Outcome.SUCCEEDED, "Succeeded", ""), driver.exit_code)
        if self.status.stop_requested_time is None:
            self._set(stop_requested_time=self.now)
        asked = self.status.stop_requested_time or self.now
        waited = (self.now - asked).total_seconds()
        alive = cluster and cluster.head and not cluster.head.ended and not cluster.deleting
        if (
            self.attempt
            and alive
            and not (driver and driver.state.ended)
            and waited < STOP_GRACE_SECONDS
        ):
            self._do(act.StopDriver(self.attempt.submission_id))
            self._again(1)
            return False
        self._close(
            Verdict(Outcome.STOPPED, "Stopped", "stopped on request"),
            driver.exit_code if driver else None,
        )
        return not self._removing_clusters()


def _progress(step: int | None, total: int | None) -> str:
    if step is None:
        return ""
    return f"{step}/{total} ({100 * step // total}%)" if total else str(step)
