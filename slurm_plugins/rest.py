"""Slurm by slurmrestd: no process a call, and Forebay may run on a host without Slurm."""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import httpx

from scheduler.contracts import ids, slurm
from slurm_plugins import find, owner, parse_reservation, parse_squeue, rest_versions, sbatch

_GONE = ("invalid job id", "already completing or completed", "already finished")
_NAME = re.compile(r"[A-Z0-9]{1,12}")


class RestClient:
    """`slurm.SlurmPort` over slurmrestd.

    Args:
        url: its base URL.
        user: the user to act as.
        token: returns a token for that user.
        cluster: the cluster's name; "" takes what jobs and answers say.
        timeout_s: limit of one call.
        version: a data-parser version to insist on; "" takes the newest that both sides know.
        transport: for tests.
    """

    kind = "slurmrestd"

    def __init__(
        self,
        url: str,
        *,
        user: str,
        token: Callable[[], str],
        cluster: str = "",
        timeout_s: float = 20.0,
        version: str = "",
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        # A cluster's proxy settings are for the outside world; Slurm is inside.
        self._http = httpx.Client(
            base_url=url, timeout=timeout_s, trust_env=False, transport=transport
        )
        self._url = url
        self._user = user
        self.users = owner.names(user)
        self._token = token
        self._timeout_s = timeout_s
        self._cluster = cluster
        self._adapter = rest_versions.ADAPTERS[version] if version else None

    def close(self) -> None:
        """Close the kept connections."""
        self._http.close()

    @property
    def cluster(self) -> str:
        """The cluster's name; the first use may ask Slurm for it."""
        if not self._cluster:
            self._cluster = self._ask_cluster()
        return self._cluster

    @property
    def excludes(self) -> bool:
        """Whether its version can name nodes in a submission: v0.0.38 and older can't."""
        return self.adapter.structured

    @property
    def adapter(self) -> rest_versions.Adapter:
        """The version in use; the first use asks the server what it offers."""
        if self._adapter is None:
            value = self._load("GET", "/openapi/v3")
            self._adapter = rest_versions.newest(value.get("paths") or {})
        return self._adapter

    def versions(self) -> slurm.Versions:
        """Return the data-parser version as the client's, and Slurm's own."""
        value = self._get("ping")
        return slurm.Versions(
            client=f"v{self.adapter.version}", controller=rest_versions.slurm_version(value)
        )

    def submit(self, spec: slurm.JobSpec) -> slurm.Submitted:
        """Submit a job; an answer that does not come, or holds no id, is looked up by the stamp."""
        body = self.adapter.submission(spec)
        try:
            value = self._load("POST", self.adapter.path("job/submit"), body=body, sent_twice=False)
        except (slurm.SlurmTimeout, slurm.SlurmGarbled, _ConnectionLostError) as error:
            return find.submitted(self, spec, str(error))
        job_id = parse_squeue.number(value.get("job_id"))
        if not job_id:
            return find.submitted(self, spec, "slurmrestd answered without a job id")
        return slurm.Submitted(ids.SlurmJobId(str(job_id)), self.cluster)

    def cancel(self, job_id: ids.SlurmJobId, *, signal: str = "") -> None:
        """Cancel a job; here a signal reaches the batch script as well as the steps."""
        name = signal.upper().removeprefix("SIG")
        if signal and _NAME.fullmatch(name) is None:
            raise slurm.SlurmRefused(f"job {job_id}: {signal!r} is no signal")
        params = {"signal": name} if signal else {}
        try:
            value = self._load("DELETE", self.adapter.path(f"job/{_id(job_id)}"), params=params)
        except slurm.SlurmRefused as error:
            if not any(word in str(error).lower() for word in _GONE):
                raise
            return
        for entry in value.get("status") or []:
            said = str((entry.get("error") or {}).get("string") or "")
            quiet = not said or said == "No error" or any(word in said.lower() for word in _GONE)
            if not quiet:
                raise parse_squeue.fault(f"cancel {job_id}", said)

    def update(
        self, job_id: ids.SlurmJobId, *, time_limit_s: int | None = None, comment: str | None = None
    ) -> None:
        """Change a job's walltime or comment."""
        body: dict[str, Any] = {}
        if time_limit_s is not None:
            body["time_limit"] = self.adapter.number(sbatch.minutes(time_limit_s))
        if comment is not None:
            body["comment"] = comment
        if body:
            self._load("POST", self.adapter.path(f"job/{_id(job_id)}"), body=body)

    def jobs(self) -> tuple[slurm.Job, ...]:
        """List all jobs by one call."""
        value = self._get("jobs")
        try:
            return parse_squeue.jobs(value, cluster=self._cluster)
        except (TypeError, AttributeError, KeyError, ValueError) as error:
            raise rest_versions.unreadable("jobs", error) from error

    def states(self, job_ids: Iterable[ids.SlurmJobId]) -> Mapping[ids.SlurmJobId, slurm.JobState]:
        """Return the states of the jobs asked for, out of one list of all."""
        known = {job.job_id: job.state for job in self.jobs()}
        return {job_id: known.get(job_id, slurm.JobState.UNKNOWN) for job_id in job_ids}

    def nodes(self) -> tuple[slurm.Node, ...]:
        """List nodes."""
        value = self._get("nodes")
        try:
            return tuple(self.adapter.node(raw) for raw in value["nodes"])
        except (TypeError, AttributeError, KeyError, ValueError) as error:
            raise rest_versions.unreadable("nodes", error) from error

    def partitions(self) -> tuple[slurm.Partition, ...]:
        """List partitions."""
        value = self._get("partitions")
        try:
            return tuple(self.adapter.partition(raw) for raw in value["partitions"])
        except (TypeError, AttributeError, KeyError, ValueError) as error:
            raise rest_versions.unreadable("partitions", error) from error

    def reservations(self) -> tuple[slurm.Reservation, ...]:
        """List reservations."""
        value = self._get("reservations")
        try:
            return parse_reservation.answer(value)
        except (TypeError, AttributeError, KeyError, ValueError) as error:
            raise rest_versions.unreadable("reservations", error) from error

    def accounting(self, job_id: ids.SlurmJobId) -> tuple[slurm.JobRun, ...]:
        """Return every run of a job from ``/slurmdb``."""
        try:
            value = self._database(f"job/{_id(job_id)}")
        except slurm.SlurmRefused as error:
            if "nothing found" in str(error).lower():
                return ()
            raise
        return self.adapter.runs(value, job_id)

    def associations(self) -> tuple[slurm.Association, ...]:
        """Join associations, users and accounts from ``/slurmdb``."""
        return rest_versions.associations(
            self._database("associations"),
            self._database("users"),
            self._database("accounts"),
            cluster=self.cluster,
        )

    def config(self) -> Mapping[str, str]:
        """Return the configuration; before 0.0.45 slurmrestd tells no more than name and version."""
        if self.adapter.has_config:
            value = self._load("GET", self.adapter.path("conf").rstrip("/"))
            return {
                **self.adapter.config(value), "SLURM_VERSION": rest_versions.slurm_version(value)
            }  # fmt: skip
        return {"ClusterName": self.cluster, "SLURM_VERSION": self.versions().controller}

    def _ask_cluster(self) -> str:
        value = self._get("ping")
        named = ((value.get("meta") or {}).get("slurm") or {}).get("cluster")
        if named:
            return str(named)
        for raw in self._get("jobs").get("jobs") or []:
            if raw.get("cluster"):
                return str(raw["cluster"])
        for raw in self._database("associations").get("associations") or []:
            if raw.get("cluster"):
                return str(raw["cluster"])
        raise slurm.SlurmRefused("slurmrestd does not say the cluster's name: set [slurm] cluster")

    def _get(self, name: str) -> dict[str, Any]:
        return self._load("GET", self.adapter.path(name))

    def _database(self, name: str) -> dict[str, Any]:
        return self._load("GET", self.adapter.path(name, database=True))

    def _load(
        self,
        method: str,
        path: str,
        *,
        body: Mapping[str, Any] | None = None,
        params: Mapping[str, str] | None = None,
        sent_twice: bool = True,
    ) -> dict[str, Any]:
        what = f"slurmrestd {method} {path}"
        headers = {"X-SLURM-USER-NAME": self._user, "X-SLURM-USER-TOKEN": self._token()}
        try:
            answer = self._http.request(method, path, json=body, params=params, headers=headers)
        except httpx.ConnectError as error:
            raise slurm.SlurmUnavailable(
                f"{what}: {error}; is slurmrestd up at {self._url}?"
            ) from error
        except httpx.TimeoutException as error:
            raise slurm.SlurmTimeout(f"{what}: no answer within {self._timeout_s:g} s") from error
        except httpx.HTTPError as error:
            kind = slurm.SlurmUnavailable if sent_twice else _ConnectionLostError
            raise kind(f"{what}: {error!r}") from error
        return _value(answer, what, path)


class _ConnectionLostError(slurm.SlurmUnavailable):
    """The connection broke while a submission was out."""


def _value(answer: httpx.Response, what: str, path: str) -> dict[str, Any]:
    if answer.status_code in {401, 403}:
        raise slurm.SlurmRefused(
            f"{what}: HTTP {answer.status_code}; the token was refused: check [slurm] jwt_key_file, rest_user"
        )
    is_json = "json" in answer.headers.get("content-type", "")
    if answer.status_code == 404 and not is_json and path.startswith("/slurmdb/"):
        raise slurm.AccountingOff(
            f"{what}: slurmrestd has no accounting, so the cluster keeps none"
        )
    if answer.status_code >= 400 and not is_json:
        text = " ".join(answer.text.split())[:200]
        raise parse_squeue.fault(f"{what}: HTTP {answer.status_code}", text)
    value = parse_squeue.load(answer.content, what)
    if answer.status_code >= 400:
        raise slurm.SlurmRefused(f"{what}: HTTP {answer.status_code}")
    return value


def _id(job_id: str) -> str:
    if re.fullmatch(r"\d+(_\d+)?", job_id, re.ASCII) is None:
        raise slurm.SlurmRefused(f"{job_id!r} is no job id")
    return job_id
