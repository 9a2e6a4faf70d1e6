"""Memory as the allocator of PyTorch reports it to the profiler, on a CPU."""

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile, record_function

_MARK = "from here on"


def peak_of(build: Callable[[], object], run: Callable[[object], object]) -> int:
    """Largest number of bytes that `run(build())` holds, with what `build` has made."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        built = build()
        with record_function(_MARK):
            pass
        run(built)
    events = profiler.profiler.kineto_results.events()
    start = next(event.start_ns() for event in events if event.name() == _MARK)
    total = peak = 0
    for time, size in sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"):
        total += size
        peak = max(peak, total) if time >= start else peak
    return peak
