"""What the monitor's server answers: the page, its data, and metrics."""

from __future__ import annotations

from collections.abc import Callable
from importlib import resources
from typing import TYPE_CHECKING

from dataparallel.threads.timeline import PHASES
from dataparallel.tools.extras import needs_extra
from dataparallel.tools.monitor.metrics import METRICS
from dataparallel.tools.monitor.palette import PHASE_STYLES
from dataparallel.tools.monitor.prometheus import registry_of
from dataparallel.tools.monitor.reading import json_text
from dataparallel.tools.monitor.sample_store import CHARTED, SampleStore
from dataparallel.tools.monitor.server import Answer, Request, Route

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

#: The files of the page, and as what they are sent.
_PAGE = {
    "/": ("index.html", "text/html; charset=utf-8"),
    **{f"/{name}.css": (f"{name}.css", "text/css; charset=utf-8") for name in ("page", "sections")},
    **{
        f"/{name}.js": (f"{name}.js", "text/javascript; charset=utf-8")
        for name in ("page", "charts", "devices", "processes", "run", "text")
    },
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
_JSON = "application/json"
#: More digits than any count of samples has; Python refuses to read thousands of them.
_LONGEST_NUMBER = 18


def routes(store: SampleStore, interval: float) -> dict[str, Route]:
    """What answers, by path.

    Example::

        server = MonitorServer("127.0.0.1", 8377, routes(store, interval=1.0))

    Args:
        store: The samples.
        interval: Seconds between them; the page asks as often.

    Raises:
        ImportError: prometheus-client is not installed.
    """
    about = Answer(json_text(_about(interval)).encode(), _JSON)
    return {
        **{path: Route(_file(*what), is_public=True) for path, what in _PAGE.items()},
        "/metrics": Route(_metrics(registry_of(lambda: store.latest, lambda: store.scores))),
        "/api/about": Route(lambda request: about),
        "/api/samples": Route(lambda request: _samples(store, request)),
    }


def _about(interval: float) -> dict[str, object]:
    """What the page must know to show samples."""
    return {
        "interval": interval,
        "charted": CHARTED,
        "metrics": [
            {"name": metric.name, "unit": metric.unit, "meaning": metric.meaning}
            for metric in METRICS
        ],
        "phases": [
            {"name": phase, "color": PHASE_STYLES[phase].color, "ink": PHASE_STYLES[phase].ink}
            for phase in PHASES
        ],
    }


def _file(name: str, kind: str) -> Callable[[Request], Answer]:
    content = (
        resources.files("dataparallel.tools.monitor").joinpath("page").joinpath(name).read_bytes()
    )
    answer = Answer(content, kind)
    return lambda request: answer


def _metrics(registry: CollectorRegistry) -> Callable[[Request], Answer]:
    with needs_extra("monitor"):
        from prometheus_client.exposition import choose_encoder

    def answer(request: Request) -> Answer:
        encode, kind = choose_encoder(request.headers.get("Accept", ""))
        return Answer(encode(registry), kind)

    return answer


def _samples(store: SampleStore, request: Request) -> Answer:
    number = request.query.get("after", "0")
    if not number.isdecimal() or len(number) > _LONGEST_NUMBER:
        return Answer(
            f"after= is the number of the last sample that is known, 0 for none, but got "
            f"{number[:40]!r}"
            "\n".encode(),
            status=400,
        )
    return Answer(store.after(int(number)).encode(), _JSON)
