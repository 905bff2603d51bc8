"""The table ``[accounting]`` of ``forebay.toml``."""

import dataclasses
import zoneinfo

from scheduler.contracts.settings import setting


@dataclasses.dataclass(frozen=True, slots=True)
class Accounting:
    """How usage is recorded, kept and shared out."""

    segment_bytes: int = setting(
        4 * 1024 * 1024,
        "Size of one spool segment; each process holds up to two ahead, so that those admitted can close.",
        unit="bytes",
        least=256 * 1024,
    )
    segment_age_s: float = setting(
        60.0,
        "Age at which a segment with rows is sealed, so that it is shipped soon.",
        unit="s",
        least=1,
    )
    ship_every_s: float = setting(
        60.0, "How often the leading broker turns sealed segments into Parquet.", unit="s", least=1
    )
    gpu_minutes_every_s: float = setting(
        300.0,
        "How often the leading broker writes hours of GPU minutes that are over or that rows came to.",
        unit="s",
        least=10,
    )
    roll_every_s: float = setting(
        60.0, "How often the leading broker brings accounting.duckdb up to date.", unit="s", least=1
    )
    minutes_kept_h: float = setting(
        48.0,
        "Age up to which sums by minute are kept; hours and days are kept for ever.",
        unit="h",
        least=2,
    )
    open_at_most_s: float = setting(
        21_600.0,
        "Longest life of an attempt: one that was opened and never closed counts as an error after that.",
        unit="s",
        least=60,
    )
    takeover_s: float = setting(
        300.0,
        "Silence after which a living writer's segment is shipped; it notices and loses nothing.",
        unit="s",
        least=10,
    )
    memory_mb: int = setting(
        512, "DuckDB's memory for one report; larger ones spill to disk.", unit="MB", least=64
    )
    prefill_weight: int = setting(
        1, "Weight of an uncached prompt token when GPU time is shared out.", least=0
    )
    decode_weight: int = setting(
        4,
        "Weight of an output token when GPU time is shared out: prompts are computed many at once.",
        least=0,
    )
    rows_at_most: int = setting(
        100_000, "Rows in one answer of facct; more is told, never cut in silence.", least=1
    )
    reports_at_once: int = setting(
        4, "Reports that one gateway process makes at once; more wait.", least=1, most=64
    )
    reports_each: int = setting(
        2, "Of these, of one user: the others' never wait behind them.", least=1, most=64
    )
    report_wait_s: float = setting(
        20.0, "How long a report waits for its turn before it is refused.", unit="s", least=0
    )
    report_at_most_s: float = setting(
        300.0,
        "Longest reading of the records for one report; longer ones are ended.",
        unit="s",
        least=1,
    )
    time_zone: str = setting(
        "UTC",
        "Zone whose months are billed, such as Europe/Berlin; a closed month keeps the borders it had.",
    )
    late_months: int = setting(
        3,
        "Closed months in which rows that arrive late are still looked for; each is counted anew for a bill.",
        unit="months",
        least=1,
        most=24,
    )
    currency: str = setting("EUR", "What reports call the unit of money; it is never converted.")

    def __post_init__(self) -> None:
        """Refuse a zone that nobody knows where the file is read, not at the first bill."""
        try:
            if self.time_zone != "UTC":  # known everywhere, also where no zones are installed
                zoneinfo.ZoneInfo(self.time_zone)
        except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError) as error:
            raise ValueError(
                f"time_zone {self.time_zone!r}: no such zone: write Europe/Berlin"
            ) from error
        if not self.currency.isprintable() or not 1 <= len(self.currency) <= 16:
            raise ValueError(f"currency {self.currency!r}: one to 16 printable characters")
