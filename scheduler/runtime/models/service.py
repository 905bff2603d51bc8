"""Changes that people ask for: checked as a whole, then one revision; nothing that is wrong is written.

Blocks: one transaction a change, and looks at files. Callers on an event loop use a thread.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pydantic

from scheduler.contracts import clock, errors
from scheduler.core import rollouts
from scheduler.runtime.models import changes, checks, document, hardware
from scheduler.runtime.registry import declared, store


@dataclasses.dataclass(frozen=True, slots=True)
class Site:
    """What changes are made with.

    Attributes:
        inspector: looks at files, engines' parsers and nodes.
        adapter_folders: in which adapters may lie.
        node_gpus: GPUs of a node, over several of which a replica may go; 0: not known, and none does.
    """

    registry: store.Registry
    time: clock.Clock
    inspector: checks.Inspector = dataclasses.field(default_factory=checks.Unseen)
    adapter_folders: Sequence[str] = ()
    node_gpus: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Wish:
    """Who wants a change and why; `dry_run`: tell the difference only."""

    author: str
    reason: str = ""
    dry_run: bool = False


Entries = dict[document.Key, Any]
RolloutChange = Callable[[rollouts.Rollout, int], rollouts.Rollout]
TRIES = 8


def add(site: Site, key: document.Key, body: Mapping[str, Any], wish: Wish) -> declared.Revision:
    """Declare something new.

    Raises:
        errors.BadRequest: it is there, or wrong; the message names the field.
        errors.NotFound: its model is not there.
    """

    def edit(found: Entries) -> Entries:
        kind, model, name = key
        if key in found:
            raise errors.BadRequest(
                f"{document.key_text(key)}: is there; `fctl {kind} update` changes it", param="name"
            )
        if kind not in {"model", "profile"}:
            _there(found, ("model", model, ""))
        found[key] = _valid(key, body)
        if kind == "model":
            found["route", model, ""] = {}
        elif kind == "version" and not found.get(("route", model, ""), {}).get("versions"):
            found["route", model, ""] = {"versions": {name: 100}}  # nothing else could answer
        return found

    return _change(site, edit, wish)


def update(site: Site, key: document.Key, said: Mapping[str, Any], wish: Wish) -> declared.Revision:
    """Change fields: `engine_args.x` one item of a table, `engine_args` all of it, None: as by default.

    Raises:
        errors.BadRequest: a field is unknown or wrong.
        errors.NotFound: it is not there.
    """

    def edit(found: Entries) -> Entries:
        body = dict(_there(found, key))
        for name, value in said.items():
            field, dot, item = name.partition(".")
            target, last = body, field
            if dot:
                table = body.get(field) or {}
                if not isinstance(table, Mapping):
                    raise errors.BadRequest(
                        f"{field}: is no table, so it has no {item}", param="set"
                    )
                target = body[field] = dict(table)
                last = item
            if value is None:
                target.pop(last, None)
            else:
                target[last] = value
        found[key] = _valid(key, body)
        return found

    return _change(site, edit, wish)


def remove(site: Site, key: document.Key, wish: Wish) -> declared.Revision:
    """Take something away; a model goes with all that is its.

    Raises:
        errors.BadRequest: something else still needs it.
        errors.NotFound: it is not there.
    """

    def edit(found: Entries) -> Entries:
        kind, model, name = key
        _there(found, key)
        if kind == "version":
            route = found.get(("route", model, ""), {})
            share = route.get("versions", {}).get(name, 0)
            others = [each for each in found if each[:2] == ("version", model) and each != key]
            if share and others:
                raise errors.BadRequest(
                    f"version {model} {name}: answers {share} percent of requests; "
                    f"`fctl route update {model}` first"
                )
            shares = {each: n for each, n in route.get("versions", {}).items() if each != name}
            found["route", model, ""] = {**route, "versions": shares if others else {}}
        if kind == "profile":
            users = [each[1] for each, body in found.items() if body.get("profile") == name]
            if users:
                raise errors.BadRequest(
                    f"profile {name}: model {users[0]} is on it; `fctl model update {users[0]} "
                    "profile=...` first"
                )
        gone = {each for each in found if each == key or (kind == "model" and each[1] == model)}
        return {each: body for each, body in found.items() if each not in gone}

    return _change(site, edit, wish)


def apply(
    site: Site, given: Mapping[str, Any], wish: Wish, *, prune: bool = False
) -> declared.Revision:
    """Make what a file names as the file says; with ``prune``, take away what it does not name.

    Raises:
        errors.BadRequest: the file is wrong; the message begins with the place in it.
    """
    try:
        wanted = document.entries(document.Document.model_validate(given))
    except pydantic.ValidationError as error:
        raise errors.BadRequest(document.fault(error), param="document") from error
    named = {
        (kind == "profile", name if kind == "profile" else model) for kind, model, name in wanted
    }

    def edit(found: Entries) -> Entries:
        kept = {
            key: body
            for key, body in found.items()
            if (key[0] == "profile", key[2] if key[0] == "profile" else key[1]) not in named
        }
        return {**({} if prune else kept), **wanted}

    return _change(site, edit, wish)


def revert(site: Site, revision: int, wish: Wish) -> declared.Revision:
    """Go back to the entries as they were at a revision; that is a revision of its own.

    Raises:
        errors.NotFound: it is not kept, or has not been.
        errors.BadRequest: what was right then is wrong now.
    """
    reason = wish.reason or f"back to revision {revision}"
    wish = dataclasses.replace(wish, reason=reason)
    return _change(site, lambda _: site.registry.declared.then(revision)[1], wish)


def _change(site: Site, edit: Callable[[Entries], Entries], wish: Wish) -> declared.Revision:
    """Edit, check outside of any transaction, and commit if nobody was faster."""
    signed = declared.Signed(wish.author, wish.reason, site.time.wall_us())
    for _ in range(TRIES):
        base, before = site.registry.declared.entries()
        after = edit(dict(before))
        _check(site, before, after)
        try:
            return site.registry.declared.commit(after, base, signed, dry_run=wish.dry_run)
        except declared.Stale:
            continue
    raise errors.Busy("others change the catalog too: try again", retry_after_s=1.0)


def _check(site: Site, before: document.Entries, after: document.Entries) -> None:
    made = {change.key for change in changes.between(before, after)}
    whole = document.whole(after)
    unread = {**document.unread(before), **document.unread(after)}
    for (kind, name), fault in sorted(unread.items()):
        if any((kind, name) == document.owner(key) for key in made):
            raise errors.BadRequest(f"{fault}: a newer release declared it: upgrade this gateway")
    fact = site.registry.journal.fact("nodes")
    nodes = fact.body.get("nodes", ()) if fact is not None else ()
    for name in {key[2] for key in made if key[0] == "profile"} & whole.profiles.keys():
        if fault := hardware.fault(whole.profiles[name], nodes, site.node_gpus):
            raise errors.BadRequest(f"profiles.{name}.{fault}")
    for fault in checks.faults(whole, site.inspector, frozenset(made), site.adapter_folders):
        raise errors.BadRequest(fault)
    for model in {key[1] for key in made if key[1]}:
        rollout = site.registry.rollouts.get(model)
        if rollout is None or rollout.state is rollouts.State.OVER:
            continue
        moved = {("route", model, ""), ("version", model, rollout.version)}
        # Those before are what going back needs.
        needed = {("version", model, each) for each in rollout.before} | {("model", model, "")}
        if made & moved or needed & made - after.keys():
            raise errors.BadRequest(
                f"models.{model}: its rollout of {rollout.version} moves that now; "
                f"`fctl rollback {model}` ends it"
            )


def _there(found: Mapping[document.Key, Any], key: document.Key) -> Mapping[str, Any]:
    if key in found:
        body: Mapping[str, Any] = found[key]
        return body
    kind, model, _ = key
    known = sorted(
        each[1] if kind in {"model", "route"} else each[2]
        for each in found
        if each[0] == kind and (kind in {"model", "route", "profile"} or each[1] == model)
    )
    raise errors.NotFound(
        f"{document.key_text(key)}: not declared; known are: {', '.join(known) or 'none'}"
    )


def _valid(key: document.Key, body: Mapping[str, Any]) -> dict[str, Any]:
    kind = document.KINDS[key[0]]
    try:
        made = kind.model_validate(body)
    except pydantic.ValidationError as error:
        place = document.key_text(key)
        raise errors.BadRequest(document.fault(error, place), param="spec") from error
    found: dict[str, Any] = made.model_dump(mode="json", exclude_defaults=True)
    if kind is document.Model:
        for part in ("versions", "route", "adapters"):
            if found.pop(part, None):
                raise errors.BadRequest(
                    f"{document.key_text(key)}.{part}: has a command of its own: fctl {part.rstrip('s')}"
                )
    return found
