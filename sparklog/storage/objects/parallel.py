"""Parallel requests to a store, as many as it answers in about the time of one.

- `Store.requests_at_once` decides how many. On a disk or in memory there is nothing to gain, so
  everything runs sequentially in the caller's thread.
- Results are in the order of the items. The error of the first item that failed is raised once all
  calls that were started have ended, so that none continues behind the caller's back.
- Each call has its own threads, so no caller waits for another's requests, and a forked process
  does not inherit a pool whose threads are gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from sparklog.storage.objects.base import Store

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def in_parallel(
    store: Store,
    call: Callable[[_Item], _Result],
    items: Iterable[_Item],
    *,
    at_once: int | None = None,
) -> list[_Result]:
    """Calls `call`, which makes requests to `store`, for each item, and returns the results.

    If `call` itself makes requests in parallel, bound one of the two levels: their thread counts
    multiply. Raises what `call` raises.

    Args:
        store: decides how many calls run concurrently.
        call: called with each item, from several threads if the store benefits from it.
        items: the arguments; consumed before the first call.
        at_once: the maximum number of concurrent calls, if lower than the store's.
    """
    arguments = list(items)
    most = store.requests_at_once if at_once is None else min(at_once, store.requests_at_once)
    workers = min(most, len(arguments))
    if workers <= 1:
        return [call(each) for each in arguments]
    with ThreadPoolExecutor(workers, thread_name_prefix="sparklog-requests") as pool:
        running: list[Future[_Result]] = []
        # If no thread can be started, as at interpreter shutdown, this one does the rest.
        with suppress(RuntimeError):
            running.extend(pool.submit(call, each) for each in arguments)
        inline = [call(each) for each in arguments[len(running) :]]
        try:
            return [each.result() for each in running] + inline
        finally:
            for future in running:
                future.cancel()
