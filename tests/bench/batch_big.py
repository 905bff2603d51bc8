"""Ten million lines: taken in and validated as the gateway does, journalled as the runner does, resumed.

No engine answers so many within a bench: the journal's entries are written by the runner's own journal alone.
The process that writes them ends without a word, and a whole runner goes on from there.
"""

import json
import os
import time
from pathlib import Path
from typing import Any

from batch_jobs import intake, journal, journal_writer, jsontext, lines, results
from tests.bench import batch_lines

_OPEN = 1_000  # lines at the end that are left to the resumed runner
_COMMIT = 2_000  # lines in one commit
_BODY = jsontext.read(batch_lines.ANSWER)


def fill(folder: str, count: int, answered: int, told: Any) -> None:
    """Journal an answer for each line, in a process of its own, which then ends as if killed."""
    cpu = time.process_time()
    writer = journal_writer.Writer(Path(folder) / results.JOURNAL, count)
    done = writer.recovered
    for number in range(1, answered + 1):
        line = lines.Line(number, f"c{number}", "/v1/chat/completions", {})
        data = results.answered(1, line, "req-1", _BODY)
        for kind, said in (
            (journal.Kind.DISPATCHED, b""),
            (journal.Kind.USED, journal.used(20, 0, 10)),
            (journal.Kind.SUCCEEDED, data),
        ):
            entry = journal.Entry(kind, number, int(kind is journal.Kind.DISPATCHED), said)
            if done.add(entry):
                writer.append(entry)
        if not number % _COMMIT:
            due = writer.due()
            writer.commit()
            if due is not None:
                writer.keep(due)
    writer.commit()
    told.send((time.process_time() - cpu, batch_lines.peak_mb(os.getpid())))
    os._exit(0)


def measure(folder: Path, count: int) -> dict[str, Any]:
    """Take ``count`` lines in, journal all but the last, let a runner journal those; write no results."""
    began = time.perf_counter()
    store, took = batch_lines.submit(folder, count, short=True)
    taken_s = time.perf_counter() - began
    answered = max(0, count - _OPEN)
    cpu_s, peak_mb = batch_lines.in_process(
        fill, str(intake.job_folder(folder, 1)), count, answered
    )
    filled_s = time.perf_counter() - began - taken_s
    read_s = batch_lines.resumed(folder, count, names=("checkpoint",))
    with batch_lines.instant_gateway() as url:
        runner = batch_lines.Runner(folder, url)
        runner.until(store, lambda job: job.counts.ok > answered)
        resume_s = time.perf_counter() - runner.began
        job = runner.until(store, lambda job: job.finalizing_us > 0)
        after = runner.took(job.counts.ok)
        runner.kill()
    store.close()
    return {
        "lines": count,
        "intake_lines_per_cpu_s": round(count / max(0.001, took.cpu_s)),
        "intake_rss_mb": round(took.rss_mb, 1),
        "journal_lines_per_cpu_s": round(answered / max(0.001, cpu_s)),
        "rss_mb": round(max(peak_mb, after.rss_mb), 1),
        "recover_s": read_s,
        "resume_s": round(resume_s, 2),
        "taken_s": round(taken_s, 1),
        "filled_s": round(filled_s, 1),
        "lost": count - job.counts.ok,
    }


if __name__ == "__main__":
    import sys
    import tempfile

    with tempfile.TemporaryDirectory(prefix="forebay-bench-") as name:
        print(json.dumps(measure(Path(name), int(sys.argv[1]))))
