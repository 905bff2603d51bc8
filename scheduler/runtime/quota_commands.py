"""fctl quota (also fctl budget): limits in sacctmgr's manners, K=V and -1 to clear."""

import decimal
import textwrap
from collections.abc import Sequence
from typing import Any, TextIO

from scheduler.contracts import command_line, ports, requests
from scheduler.core import quota_limits as limits
from scheduler.runtime import listing

_OWNER = ("team", "user", "key", "model", "tier")
_SUFFIXES = {"k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_PATH = "/admin/quotas"
_EPILOG = f"""examples:
  fctl quota set team=physics tokens_per_minute=200k tokens_per_day=20M
  fctl quota set team=physics cost_per_month=500 --soft --reason "grant 42"
  fctl quota set team=physics user=ada concurrent=8 model=chat tier=interactive
  fctl quota set team=physics 'user=*' tokens_per_day=1M     each user without one of their own
  fctl quota show team=physics
  fctl quota rm team=physics tokens_per_day                   the same: set … tokens_per_day=-1
{textwrap.fill(f"kinds: {', '.join(limits.Kind)}", 100)}
Days and months are UTC. Amounts take k, M, G, T; costs are in the site's currency."""


def add(commands: Any) -> None:
    """Add the commands to fctl's parser."""
    quota = commands.add_parser(
        "quota",
        aliases=["budget"],
        help="set, show or remove limits on tokens, requests and cost",
        epilog=_EPILOG,
    )
    verbs = quota.add_subparsers(dest="verb", required=True, metavar="VERB")
    found = {
        "set": verbs.add_parser("set", help="set limits: team=T [user=U|key=K] KIND=AMOUNT …"),
        "rm": verbs.add_parser("rm", help="remove limits: team=T [user=U|key=K] KIND … or all"),
        "show": verbs.add_parser("show", help="show limits and use: [team=T] [user=U] [key=K]"),
        "history": verbs.add_parser("history", help="show who has changed limits, when and why"),
    }
    for verb, act in (("set", _set), ("rm", _rm), ("show", _show), ("history", _history)):
        found[verb].set_defaults(act=act)
        found[verb].add_argument("--json", action="store_true", help="print JSON")
    for verb in ("set", "rm"):
        found[verb].add_argument("pairs", nargs="+", metavar="K=V")
        found[verb].add_argument("--reason", default="", help="kept in the history")
    found["set"].add_argument("--soft", action="store_true", help="only warn")
    found["set"].add_argument(
        "--force", action="store_true", help="also for a team, user, key or model not known yet"
    )
    found["show"].add_argument("pairs", nargs="*", metavar="K=V")


def amount(kind: limits.Kind, text: str) -> int | None:
    """Return an amount as typed, in tokens, requests or micro-units; None for -1, which clears.

    Raises:
        command_line.CommandError: it is none.
    """
    factor = _SUFFIXES.get(text[-1:], 1)
    digits = text[:-1] if factor > 1 else text
    try:
        value = decimal.Decimal(digits) * factor
    except decimal.DecimalException:
        value = decimal.Decimal("NaN")
    if value == -1:
        return None
    if kind.unit is limits.Unit.COST:
        value *= limits.MONEY
    whole = value.is_finite() and value == value.to_integral_value()
    if not whole or value < 0 or "_" in text:
        what = "an amount of money" if kind.unit is limits.Unit.COST else "a whole number"
        raise command_line.CommandError(
            f"{kind}={text}: write {what} of 0 or more, with k, M, G or T if you like (-1 clears)"
        )
    if value > limits.MOST:
        raise command_line.CommandError(f"{kind}={text}: at most {kind.show(limits.MOST)}")
    return int(value)


def _set(args: Any, api: ports.Api, out: TextIO, stdin: TextIO | None) -> None:
    owner, rest = _split(args.pairs, args.verb)
    wanted = {name: amount(_kind(name), value) for name, value in rest.items()}
    if not wanted:
        raise command_line.CommandError(
            f"set: write what to limit, as {limits.Kind.TOKENS_PER_DAY}=1M"
        )
    _change(args, api, out, {**owner, "limits": wanted, "hard": not args.soft, "force": args.force})


def _rm(args: Any, api: ports.Api, out: TextIO, stdin: TextIO | None) -> None:
    words = [word if "=" in word or word == "all" else f"{word}=-1" for word in args.pairs]
    every = "all" in words
    owner, rest = _split([word for word in words if word != "all"], args.verb)
    wanted: dict[str, int | None] = {_kind(name).value: None for name in rest}
    if every:
        for row in api.call("GET", _PATH, params={"team": owner["team"]}).json["quotas"]:
            if not row["of"] and all(_same(row, owner, name) for name in _OWNER[1:]):
                wanted[row["kind"]] = None
    if not wanted:
        raise command_line.CommandError("rm: no such limit; see `fctl quota show`")
    _change(args, api, out, {**owner, "limits": wanted})


def _same(row: dict[str, Any], owner: dict[str, Any], name: str) -> bool:
    has: str = row[name] if name in row else row["name"] if row["scope"] == name else ""
    return bool(has == owner.get(name, ""))


def _change(args: Any, api: ports.Api, out: TextIO, body: dict[str, Any]) -> None:
    answer = api.call("POST", _PATH, json={**body, "reason": args.reason}).json
    if args.json:
        command_line.print_json(answer, out)
        return
    for row in answer["changed"]:
        kind = limits.Kind(row["kind"])
        to = "removed" if row["amount"] is None else kind.show(row["amount"])
        command_line.say(f"{_who(row)}: {kind} {to}", out)


def _show(args: Any, api: ports.Api, out: TextIO, stdin: TextIO | None) -> None:
    params, rest = _split(args.pairs, args.verb)
    known = {"team", "user", "key"}
    if rest or set(params) - known:
        wrong = sorted({*rest, *params} - known)[0]
        raise command_line.CommandError(f"show: unknown key {wrong}; known are team, user, key")
    answer = api.call("GET", _PATH, params=params).json
    if args.json:
        command_line.print_json(answer, out)
    elif not answer["quotas"]:
        print("no quotas", file=out)
    else:
        rows = [listing.quota(row) for row in answer["quotas"]]
        command_line.table(
            [name.upper() for name in rows[0]], [[*row.values()] for row in rows], out
        )


def _history(args: Any, api: ports.Api, out: TextIO, stdin: TextIO | None) -> None:
    answer = api.call("GET", f"{_PATH}/history").json
    if args.json:
        command_line.print_json(answer, out)
        return
    rows = [
        (
            listing.when(row["at_us"]),
            row["team"],
            listing.quota_owner(row),
            row["model"] or "all",
            row["tier"] or "all",
            row["kind"],
            "removed"
            if row["amount"] is None
            else limits.Kind(row["kind"]).show(row["amount"]) + ("" if row["hard"] else " soft"),
            row["author"],
            row["reason"],
        )
        for row in answer["changes"]
    ]
    header = ("AT", "TEAM", "FOR", "MODEL", "TIER", "KIND", "LIMIT", "BY", "REASON")
    command_line.table(header, rows, out)


def _who(row: dict[str, Any]) -> str:
    parts = [
        f"team {row['team']}",
        "" if row["scope"] == limits.Scope.TEAM else listing.quota_owner(row),
    ]
    parts += [row["model"] and f"model {row['model']}", row["tier"] and f"tier {row['tier']}"]
    return " ".join(part for part in parts if part)


def _kind(name: str) -> limits.Kind:
    try:
        return limits.Kind(name)
    except ValueError:
        raise command_line.CommandError(
            f"{name}: no such kind of quota; known are {', '.join(limits.Kind)}"
        ) from None


def _split(words: Sequence[str], verb: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return whose limits the words name, and the rest."""
    owner: dict[str, Any] = {}
    rest: dict[str, str] = {}
    for word in words:
        name, sign, value = word.partition("=")
        if not sign or not name or not value:
            raise command_line.CommandError(f"{verb}: {word}: write KEY=VALUE")
        name = {"account": "team"}.get(name.lower(), name.lower())
        into = owner if name in _OWNER else rest
        if name in into:
            raise command_line.CommandError(f"{verb}: {name} is given twice")
        into[name] = value
    if verb != "show" and "team" not in owner:
        raise command_line.CommandError(f"{verb}: write team=NAME")
    if owner.get("tier", requests.Tier.BATCH) not in set(requests.Tier):
        known = ", ".join(requests.Tier)
        raise command_line.CommandError(f"tier={owner['tier']}: no such tier; known are {known}")
    return owner, rest
