"""How each data-parser version of slurmrestd spells what we ask and what it answers. Pure.

One `Adapter` a version behind one small interface; `rest.RestClient` picks the newest that the server lists.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from scheduler.contracts import ids, slurm
from slurm_plugins import hostlist, parse_squeue, sbatch, stamp, states, tres


@dataclasses.dataclass(frozen=True, slots=True)
class Adapter:
    """One data-parser version.

    Attributes:
        version: as in the path (`0.0.45`).
        slash: what list paths end in.
        structured: whether numbers are ``{"set": …, "number": …}`` and environments are lists.
        has_config: whether ``/conf`` is there.
    """

    version: str
    slash: str = "/"
    structured: bool = True
    has_config: bool = False

    def path(self, name: str, *, database: bool = False) -> str:
        """Return the path of a list (`jobs`) or of an item (`job/4711`)."""
        root = "slurmdb" if database else "slurm"
        end = "" if "/" in name else self.slash
        return f"/{root}/v{self.version}/{name}{end}"

    def submission(self, spec: slurm.JobSpec) -> dict[str, Any]:
        """Return the body of a submission."""
        sbatch.check(spec)
        environment = sbatch.environment(spec)
        gres = (
            tres.request(spec.gpus_per_node, spec.gres_type, spec.gres)
            if spec.gpus_per_node
            else ""
        )
        job: dict[str, Any] = {
            "name": spec.name,
            "partition": ",".join(spec.partitions),
            "time_limit": self.number(sbatch.minutes(spec.time_limit_s)),
            "standard_output": spec.output,
            "current_working_directory": spec.directory,
            "comment": stamp.render(spec.stamp) if spec.stamp is not None else "",
            "account": spec.account,
            "qos": spec.qos,
            "constraints": spec.constraint,
            "tasks_per_node": 1,
            "cpus_per_task": spec.cpus_per_node,
            "requeue": False,
            "time_minimum": self.number(sbatch.minutes(spec.time_min_s)) if spec.time_min_s else "",
            "memory_per_node": "" if spec.memory_mb is None else self.number(spec.memory_mb),
        }
        if self.structured:
            job |= {
                "environment": [f"{name}={value}" for name, value in environment.items()],
                "minimum_nodes": spec.nodes,
                "maximum_nodes": spec.nodes,
                "tasks": spec.nodes,
                "tres_per_node": f"gres/{gres}" if gres else "",
                "required_nodes": list(spec.nodelist) or "",
                "excluded_nodes": list(spec.exclude) or "",
                "hold": spec.hold or "",
            }
        else:
            if spec.nodelist or spec.exclude:
                raise slurm.SlurmRefused(
                    f"slurmrestd v{self.version} can't ask for nodes by name; set [slurm] client = cli"
                )
            job |= {
                "environment": environment,
                "nodes": [spec.nodes, spec.nodes],
                "tasks": spec.nodes,
                "gres": gres,
                "hold": spec.hold or "",
            }
        return {"script": spec.script, "job": {key: v for key, v in job.items() if v != ""}}

    def number(self, value: int) -> Any:
        """Return a number as this version takes it where "not set" is possible."""
        return {"set": True, "infinite": False, "number": value} if self.structured else value

    def node(self, raw: Mapping[str, Any]) -> slurm.Node:
        """Read one node."""
        base = raw.get("state") or "UNKNOWN"
        words = list(base) if isinstance(base, list) else [str(base)]
        reading = states.node([*words, *(raw.get("state_flags") or [])])
        cfg = str(raw.get("tres") or "")
        has = tres.node_gpus(gres_text=str(raw.get("gres") or ""), cfg_tres=cfg)
        free = tres.free_gpus(
            None if has is None else has.count,
            gres_used=str(raw.get("gres_used") or ""),
            cfg_tres=cfg,
            alloc_tres=str(raw.get("tres_used") or ""),
        )
        cpus = parse_squeue.number(raw.get("effective_cpus")) or parse_squeue.number(
            raw.get("cpus")
        )
        taken = parse_squeue.number(raw.get("alloc_cpus")) or 0
        return slurm.Node(
            name=str(raw["name"]),
            state=reading.state,
            flags=reading.flags,
            usable=reading.usable,
            partitions=tuple(raw.get("partitions") or ()),
            gpus=None if has is None else has.count,
            gpus_free=free if reading.usable else 0,
            gres_type="" if has is None else has.gres_type,
            cpus=cpus or 0,
            cpus_free=max(0, (cpus or 0) - taken) if reading.usable else 0,
            memory_mb=parse_squeue.number(raw.get("real_memory")) or 0,
            reason=str(raw.get("reason") or ""),
            unknown_flags=reading.unknown,
            shared=tres.shared(str(raw.get("gres") or "")),
            features=_features(raw.get("features")),
        )

    def partition(self, raw: Mapping[str, Any]) -> slurm.Partition:
        """Read one partition; newer versions nest what older ones had side by side."""
        nested = isinstance(raw.get("nodes"), Mapping)
        nodes = raw["nodes"].get("configured") if nested else raw.get("nodes")
        state = _at(raw, "partition", "state") if nested else raw.get("state")
        limit = _at(raw, "maximums", "time") if nested else raw.get("max_time_limit")
        minutes = parse_squeue.number(limit)
        mode = raw.get("preempt_mode") if nested else raw.get("preemption_mode")
        tier = _at(raw, "priority", "tier") if nested else raw.get("priority_tier")
        grace = raw.get("grace_time") if nested else raw.get("preemption_grace_time")
        words = [str(word).upper() for word in (mode if isinstance(mode, list) else [mode or ""])]
        return slurm.Partition(
            name=str(raw["name"]),
            up="UP" in ([str(s) for s in state] if isinstance(state, list) else [str(state)]),
            nodes=tuple(hostlist.expand(str(nodes or ""))),
            max_time_s=None if minutes is None else minutes * 60,
            preempt_mode=",".join("OFF" if word == "DISABLED" else word for word in words),
            priority_tier=parse_squeue.number(tier) or 1,
            grace_time_s=parse_squeue.number(grace) or 0,
        )

    def runs(self, value: Mapping[str, Any], job_id: ids.SlurmJobId) -> tuple[slurm.JobRun, ...]:
        """Read a job's runs from ``/slurmdb/…/job/ID``, oldest first."""
        found = []
        for raw in value.get("jobs") or []:
            if str(raw.get("job_id")) != job_id:
                continue
            times = raw.get("time") or {}
            allocated = _tres_text(_at(raw, "tres", "allocated") or [])
            found.append((parse_squeue.number(times.get("start")) or 0, times, allocated, raw))
        found.sort(key=lambda entry: entry[0] or float("inf"))
        return tuple(
            slurm.JobRun(
                job_id=job_id,
                run=number,
                state=states.job(_at(raw, "state", "current") or "UNKNOWN").state,
                started_us=start * 1_000_000,
                ended_us=(parse_squeue.number(times.get("end")) or 0) * 1_000_000,
                elapsed_s=parse_squeue.number(times.get("elapsed")) or 0,
                gpus=tres.gpus(allocated),
                shared=tres.shared(allocated),
                node_count=parse_squeue.number(raw.get("allocation_nodes")) or 0,
                exit_code=parse_squeue.exit_code(raw.get("exit_code")),
            )
            for number, (start, times, allocated, raw) in enumerate(found)
        )

    def config(self, value: Mapping[str, Any]) -> dict[str, str]:
        """Flatten ``/conf`` to text, as ``scontrol show config`` has it."""
        raw = value.get("slurm_conf") or {}
        return {str(key): _text(entry) for key, entry in raw.items()}


def associations(
    assoc: Mapping[str, Any], users: Mapping[str, Any], accounts: Mapping[str, Any], *, cluster: str
) -> tuple[slurm.Association, ...]:
    """Join the three lists of ``/slurmdb``."""
    known = {str(user.get("name")): user for user in users.get("users") or []}
    coordinators = {
        (str(account.get("name")), str(c.get("name") if isinstance(c, Mapping) else c))
        for account in accounts.get("accounts") or []
        for c in account.get("coordinators") or []
    }
    found: dict[tuple[str, str], slurm.Association] = {}
    for raw in assoc.get("associations") or []:
        if raw.get("cluster") not in {None, "", cluster}:
            continue
        name, account = str(raw.get("user") or ""), str(raw.get("account") or "")
        user = known.get(name, {})
        level = user.get("administrator_level") or ""
        levels = level if isinstance(level, list) else [level]
        found[account, name] = slurm.Association(
            user=name,
            account=account,
            default=bool(name) and _at(user, "default", "account") == account,
            coordinator=(account, name) in coordinators,
            admin=any(str(word).lower().startswith("admin") for word in levels),
        )
    return tuple(found.values())


def _at(value: Mapping[str, Any], *keys: str) -> Any:
    found: Any = value
    for key in keys:
        if not isinstance(found, Mapping):
            return None
        found = found.get(key)
    return found


def _tres_text(listed: Any) -> str:
    """Return a list of ``{"type": "gres", "name": "gpu[:type]", "count": n}`` as sacct writes it."""
    return ",".join(
        f"{entry.get('type')}/{entry.get('name')}={parse_squeue.number(entry.get('count')) or 0}"
        for entry in listed
        if isinstance(entry, Mapping)
    )


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(_text(entry) for entry in value)
    if isinstance(value, Mapping):
        found = parse_squeue.number(value)
        if found is not None:
            return str(found)
        return ",".join(f"{key}={_text(entry)}" for key, entry in value.items())
    return str(value)


ADAPTERS: Mapping[str, Adapter] = {
    adapter.version: adapter
    for adapter in (
        Adapter("0.0.38", slash="", structured=False),
        Adapter("0.0.42"),
        Adapter("0.0.43"),
        Adapter("0.0.44"),
        Adapter("0.0.45", has_config=True),
    )
}


def newest(paths: Mapping[str, Any]) -> Adapter:
    """Pick the newest version that the server lists and we know.

    Raises:
        slurm.SlurmRefused: there is none.
    """
    listed = {part[1:] for path in paths for part in path.split("/") if part.startswith("v0.")}
    known = sorted(listed & ADAPTERS.keys(), key=lambda version: int(version.split(".")[2]))
    if not known:
        raise slurm.SlurmRefused(
            f"slurmrestd offers {', '.join(sorted(listed)) or 'no version'}; "
            f"known are {', '.join(ADAPTERS)}: set [slurm] client = cli"
        )
    return ADAPTERS[known[-1]]


def slurm_version(value: Mapping[str, Any]) -> str:
    """Return Slurm's version from an answer's meta data."""
    meta = value.get("meta") or {}
    return str(_at(meta, "slurm", "release") or _at(meta, "Slurm", "release") or "")


def unreadable(what: str, error: Exception) -> slurm.SlurmGarbled:
    """Return the error for an answer whose form is not the version's."""
    return slurm.SlurmGarbled(f"slurmrestd {what}: unexpected form ({error!r}); try again")


def _features(raw: Any) -> tuple[str, ...] | None:
    """Read a node's features: a list in newer versions, a text with commas in older ones."""
    if raw is None:
        return None
    found = raw if isinstance(raw, list) else str(raw).split(",")
    return tuple(str(each) for each in found if each)
