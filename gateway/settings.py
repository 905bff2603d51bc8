"""The [gateway] table of forebay.toml."""

import dataclasses
from collections.abc import Mapping

from gateway import door_settings, shadow_settings
from scheduler.contracts import requests
from scheduler.contracts.settings import setting
from scheduler.core import admission, outputs, routing

MIB = door_settings.MIB


@dataclasses.dataclass(frozen=True)
class GatewaySettings(door_settings.DoorSettings, shadow_settings.ShadowSettings):
    """What one gateway process needs to know. Port 0 takes any free port."""

    host: str = setting(
        "127.0.0.1", "Address to listen on; loopback, so that nothing is offered by accident."
    )
    http_port: int = setting(
        8000, "Port of the OpenAI interface; 0 takes a free one.", least=0, most=65535
    )
    grpc_port: int = setting(
        8001, "Port of the gRPC interface; 0 takes a free one.", least=0, most=65535
    )
    workers: int = setting(
        1,
        "Processes of `forebay gateway` that take connections on its ports, each good for one core; above "
        "1 a process of its own admits for all of them.",
        least=1,
    )
    admission_listen: str = setting(
        "",
        "`host:port` at which the gateways of other hosts ask this one for a turn, so that each model has "
        "one queue and one quota owner on all hosts; empty: this host shares no models with others. The "
        "link carries the control token and is not encrypted: a private network.",
    )
    admission_advertise: str = setting(
        "", "Host that other gateways are told to connect to; empty: the one in `admission_listen`."
    )
    admission_wait_s: float = setting(
        5.0,
        "How long requests wait for an admission process that is being started again, before they are "
        "told to come back; a start takes a second or two.",
        unit="s",
        least=0,
    )
    queue_interactive: int = setting(
        1024, "Interactive requests that may wait, per model; more are refused at once.", least=1
    )
    queue_standard: int = setting(2048, "Standard requests that may wait, per model.", least=1)
    queue_batch: int = setting(
        256, "Batch lines that may wait, per model; the rest waits in the runner.", least=1
    )
    queue_total: int = setting(
        3072,
        "Requests that may wait per model in all; past it the youngest batch is shed.",
        least=1,
    )
    queue_interactive_bytes: int = setting(
        128 * MIB,
        "Bodies of interactive requests that may wait, per model: a queue of large ones fills memory "
        "long before it is full by number.",
        unit="bytes",
        least=1024,
    )
    queue_standard_bytes: int = setting(
        128 * MIB, "The same for tier standard.", unit="bytes", least=1024
    )
    queue_batch_bytes: int = setting(64 * MIB, "The same for tier batch.", unit="bytes", least=1024)
    queue_total_bytes: int = setting(
        256 * MIB, "Bodies that may wait per model in all.", unit="bytes", least=1024
    )
    fair_half_life_s: float = setting(
        300.0,
        "Half of what a team was served is forgotten after so long: a heavy morning is no reason to wait "
        "in the afternoon, and a spike of a minute is remembered while it lasts.",
        unit="s",
        least=1,
    )
    fair_credit_tokens: float = setting(
        10_000.0,
        "Weighted tokens (prompt 1, cached 0.1, output 2) by which a team that comes back after a pause "
        "may lead the others: a few requests, however long it was away.",
        unit="tokens",
        least=0,
    )
    team_shares: Mapping[str, float] = setting(
        {}, "A team's share of a busy model, 1 where it is not named: with 2 it gets twice as much."
    )
    age_standard_s: float = setting(
        30.0,
        "Once a standard request has waited so long, every `age_turns`-th seat is for standard, so that "
        "interactive requests can't hold it up for ever.",
        unit="s",
        least=0,
    )
    age_turns: int = setting(
        8, "Every how many turns one is standard's, once it has aged; 8 leaves 7 of 8.", least=2
    )
    team_holdback: float = setting(
        0.25,
        "A team that has more than its equal part in flight while others come too leaves this part of a "
        "model's replicas (rounded down) free of its prompts: a request of theirs then need not wait until "
        "one of its has been computed.",
        least=0,
        most=0.9,
    )
    holdback: float = setting(
        0.1,
        "Part of a model's seats that standard leaves to interactive requests while these come; it takes "
        "effect from 10 seats on.",
        least=0,
        most=0.9,
    )
    reserve_after_s: float = setting(
        5.0,
        "A request for which no replica has room at one moment (several sequences, a long prompt), while "
        "smaller ones behind it are placed, has a replica kept free for it after so long; longer than a "
        "usual answer, so that few replicas ever stand half empty.",
        unit="s",
        least=0,
    )
    output_first_tokens: int = setting(
        256,
        "Tokens that an answer is thought to have before a team's own answers have told.",
        unit="tokens",
        least=1,
    )
    output_most_tokens: int = setting(
        32_768,
        "The longest that a sequence gets whose request names no max_tokens, beside what its model's context "
        "leaves: one that never ends would hold its seat for as long as the context is. An engine behind "
        "HTTP that is not Forebay's goes by its own bound. 0: the context alone.",
        unit="tokens",
        least=0,
    )
    output_quantile: float = setting(
        0.9,
        "Part of a team's latest answers that the room kept for the next one would have held; the rest "
        "is what the engine's own preemption is for.",
        least=0,
        most=1,
    )
    long_prompt_tokens: int = setting(
        16384,
        "Prompts of so many tokens and more go to the replicas set apart for them; 0: nowhere apart. A "
        "prefill of 16k tokens holds up everybody in its replica for a second.",
        unit="tokens",
        least=0,
    )
    long_per_team: int = setting(
        2, "Long prompts that one team may have in flight, per model.", least=1
    )
    deadline_interactive_s: float = setting(
        60.0, "Longest wait for a replica, if the request names no deadline.", unit="s", least=0.1
    )
    deadline_standard_s: float = setting(300.0, "The same for tier standard.", unit="s", least=0.1)
    deadline_batch_s: float = setting(
        3600.0, "The same for tier batch; the runner sends the line again.", unit="s", least=0.1
    )
    no_replica_grace_s: float = setting(
        5.0,
        "How long a model may be without any replica before its requests are refused: a restart "
        "is no reason to fail.",
        unit="s",
        least=0,
    )
    connect_timeout_s: float = setting(
        2.0, "Time to connect to a replica in the same cluster.", unit="s", least=0.1
    )
    hop_keepalive_s: int = setting(
        5,
        "TCP asks a silent replica's node for a sign of life so often: a node that dies ends no connection.",
        unit="s",
        least=1,
    )
    hop_keepalive_probes: int = setting(
        3,
        "Signs of life that a replica's node may leave out before its streams go elsewhere.",
        least=1,
    )
    hop_unacknowledged_s: float = setting(
        15.0,
        "How long bytes sent to a replica's node may stay unacknowledged before it counts as dead.",
        unit="s",
        least=0.1,
    )
    stream_idle_s: float = setting(
        60.0,
        "A stream that is silent for so long counts as lost; longer than the longest prefill.",
        unit="s",
        least=0.1,
    )
    client_stall_s: float = setting(
        60.0,
        "A client that reads nothing of what is written to it for so long is given up: it must keep no seat "
        "and no memory.",
        unit="s",
        least=0.1,
    )
    answer_timeout_s: float = setting(
        900.0, "Longest silence before a whole (not streamed) answer.", unit="s", least=0.1
    )
    replica_attempts: int = setting(
        2,
        "A request that has lost so many replicas, the last as the only suspect there, is set aside: one "
        "that kills them must not kill them all. Replicas that leave as planned don't count. 1: it is not "
        "tried again.",
        least=1,
    )
    full_backoff_s: float = setting(
        0.05,
        "A replica that said full is not asked again for so long, and for twice as long each further time "
        "until it has served one.",
        unit="s",
        least=0,
    )
    full_backoff_most_s: float = setting(
        2.0, "The longest of these pauses; a seat that is given back ends each.", unit="s", least=0
    )
    prefill_steps: float = setting(
        2.0,
        "A replica is given prompts for so many steps of its engine (max-num-batched-tokens each, 2,048 "
        "where the model's engine_args don't say) ahead; the rest waits here, where bands, fairness and "
        "deadlines order it. Two keep the engine busy while the next prompt is on its way.",
        least=1,
    )
    sticky_factor: float = setting(
        1.25,
        "A replica keeps requests whose prefix it holds up to so many times the mean load in tokens; "
        "beyond, they go where there is less to compute.",
        least=1,
    )
    sticky_slack_tokens: int = setting(
        2048,
        "A replica with less work in flight is never too loaded for its prefixes: an engine takes so "
        "much into its next step.",
        unit="tokens",
        least=0,
    )
    sticky_least_share: float = setting(
        0.1,
        "A cached prefix attracts a request only if it is this part of the prompt: else a system prompt "
        "that all share would draw every new conversation to one replica.",
        least=0,
        most=1,
    )
    long_pool_share: float = setting(
        0.25,
        "Part of a model's replicas that take long prompts (`long_prompt_tokens`), at least one.",
        least=0,
        most=1,
    )
    prefix_chunk_bytes: int = setting(
        2048,
        "Text behind one fingerprint of a long prompt, the same on every host; 2 KB is about 500 tokens.",
        unit="bytes",
        least=64,
    )
    prefix_index_pairs: int = setting(
        500_000,
        "Chunks remembered per model, over all replicas, at most 270 bytes each; 350 replicas of a 70B "
        "model hold about 400,000. What was not used for the longest time goes first.",
        least=1_000,
    )
    drain_s: float = setting(
        30.0, "After SIGTERM, how long running answers may take to end.", unit="s", least=0
    )
    access_log: str = setting(
        "errors",
        "Requests that leave a line in the log, with ids, team, model, result and time, never with text: "
        "all, errors or off; what all had and cost is in the usage record anyway.",
    )
    extra_fields: tuple[str, ...] = setting(
        (),
        "Body fields that your engines understand beside OpenAI's and vLLM's sampling options; others are "
        "refused, so that a typing error in max_tokens costs an error and not a full-length answer.",
    )
    key_cache_s: float = setting(
        10.0,
        "How long a looked-up API key is believed; a revoked one works so long.",
        unit="s",
        least=0,
    )
    munge_socket: str = setting("", "munged's socket; empty takes munge's own default.")
    munge_timeout_s: float = setting(2.0, "Time for unmunge to decode.", unit="s", least=0.1)
    report_s: float = setting(
        0.2,
        "How often demand is told to the broker; its plan looks at two in a row.",
        unit="s",
        least=0.01,
    )

    def queue_bounds(self) -> dict[requests.Tier, int]:
        """Return how many may wait in each band."""
        return {
            requests.Tier.INTERACTIVE: self.queue_interactive,
            requests.Tier.STANDARD: self.queue_standard,
            requests.Tier.BATCH: self.queue_batch,
        }

    def queue_rules(self) -> admission.Rules:
        """Return what each model's queue goes by."""
        sizes = {
            requests.Tier.INTERACTIVE: self.queue_interactive_bytes,
            requests.Tier.STANDARD: self.queue_standard_bytes,
            requests.Tier.BATCH: self.queue_batch_bytes,
        }
        return admission.Rules(
            {
                tier: admission.Bound(most, sizes[tier])
                for tier, most in self.queue_bounds().items()
            },
            admission.Bound(self.queue_total, self.queue_total_bytes),
            self.fair_half_life_s,
            self.age_standard_s,
            self.age_turns,
            self.team_shares,
            self.fair_credit_tokens,
        )

    def routing_policy(self) -> routing.Policy:
        """Return how routing weighs."""
        return routing.Policy(
            self.sticky_factor,
            self.sticky_slack_tokens,
            self.sticky_least_share,
            self.long_pool_share,
            self.prefill_steps,
        )

    def output_rules(self) -> outputs.Rules:
        """Return how answers' lengths are estimated."""
        return outputs.Rules(self.output_first_tokens, self.output_quantile)

    def deadline_s(self, tier: requests.Tier) -> float:
        """Return the longest wait of a tier in seconds."""
        return {
            requests.Tier.INTERACTIVE: self.deadline_interactive_s,
            requests.Tier.STANDARD: self.deadline_standard_s,
            requests.Tier.BATCH: self.deadline_batch_s,
        }[tier]
