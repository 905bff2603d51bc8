"""How work that blocks becomes an answer over HTTP, and each thing that can go wrong in it one line."""

import math
from collections.abc import Callable
from typing import Any

import duckdb
import fastapi
from fastapi import concurrency, responses

from accounting import manifest, postings
from scheduler.contracts import errors


async def answered(
    work: Callable[[], dict[str, Any]], status: int = 200, *, text_type: str = ""
) -> fastapi.Response:
    """Run ``work`` in a thread and answer with what it returns, or with its error in one line.

    With ``text_type`` the answer is the returned ``text``, of that type.
    """
    try:
        found = await concurrency.run_in_threadpool(work)
        if text_type:
            return responses.Response(found["text"], status, media_type=text_type)
        return responses.JSONResponse(found, status)
    except errors.ForebayError as error:
        return refused(error)
    except duckdb.InterruptException:
        return refused(
            errors.Expired(
                "this report takes too long: ask for a shorter window or fewer teams, or raise "
                "accounting.report_at_most_s"
            )
        )
    except (manifest.ManifestDamaged, postings.PostingsDamaged) as error:
        return _internal(str(error))
    except OSError as error:
        return _internal(f"{error.filename or 'state folder'}: {error.strerror or error}")
    except duckdb.OutOfMemoryException:
        return _internal(
            "this report needs more memory: ask for less, or raise accounting.memory_mb"
        )
    except (duckdb.Error, ValueError, ArithmeticError) as error:
        first = str(error).partition("\n")[0]
        return _internal(f"this report can't be made: {first}: ask for another window or team")


def _internal(message: str) -> fastapi.Response:
    return refused(errors.Internal(message))


def refused(error: errors.ForebayError) -> fastapi.Response:
    """Return an error as an answer."""
    wait = (
        {} if error.retry_after_s is None else {"Retry-After": f"{math.ceil(error.retry_after_s)}"}
    )
    return responses.JSONResponse(error.openai(), status_code=error.status, headers=wait)
