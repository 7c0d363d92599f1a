"""Looking at the driver through a dashboard: the same for every backend."""

import json
from typing import Any

from pydantic import ValidationError

from trainingjob.api.job import TrainingJob
from trainingjob.api.status import TrainingStatus
from trainingjob.planning import names
from trainingjob.planning.observed import Driver, Ray
from trainingjob.rayapi.client import Dashboard, RayError

LOG_LINES = 40


async def look(dashboard: Dashboard, job: TrainingJob) -> tuple[Ray, TrainingStatus | None, str]:
    """The driver of the attempt under way, its progress, and, once it has ended, its log."""
    attempt = job.status.attempts[-1] if job.status.attempts else None
    try:
        if attempt is None or attempt.end_time is not None:
            await dashboard.ping()
            return Ray(reachable=True), None, ""
        found = await dashboard.job(attempt.submission_id)
        if found is None:
            return Ray(reachable=True), None, ""
        driver: Driver = found.driver
        training, log = None, ""
        if found.node_id:
            file = names.progress_file(attempt.submission_id)
            training = progress(await dashboard.tail(found.node_id, file, 1))
            if driver.state.ended or job.status.stop_requested_time:
                file = names.driver_log(attempt.submission_id)
                log = await dashboard.tail(found.node_id, file, LOG_LINES)
        return Ray(reachable=True, driver=driver), training, log
    except RayError as error:
        return Ray(reachable=False, error=str(error)), None, ""


def progress(line: str) -> TrainingStatus | None:
    """The progress in the last line of a progress file. What is not understood is left out: a
    user's script writes the file, and must not be able to harm the job."""
    try:
        told: Any = json.loads(line.strip().splitlines()[-1])
    except (ValueError, IndexError):
        return None
    if not isinstance(told, dict):
        return None
    kept = {}
    for name, field in TrainingStatus.model_fields.items():
        value = told.get(field.alias or name)
        if value is None or value != value or value in (float("inf"), float("-inf")):
            continue
        try:
            TrainingStatus.model_validate({field.alias or name: value})
        except ValidationError:
            continue
        kept[field.alias or name] = value
    return TrainingStatus.model_validate(kept) if kept else None
