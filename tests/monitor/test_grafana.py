"""The dashboard for Grafana, beside what Prometheus is told."""

from __future__ import annotations

import json
import pathlib
import re
from collections import Counter
from typing import Any

import pytest
from prometheus_client import parser

from dataparallel.threads import PHASES
from dataparallel.tools.monitor.palette import DARK
from tests.monitor.cases import make_sample
from tests.monitor.test_serve import EVERYTHING, exposed

PATH = pathlib.Path(__file__).parents[2] / "docs" / "grafana.json"


@pytest.fixture
def dashboard() -> Any:
    return json.loads(PATH.read_text())


def test_all_that_the_dashboard_asks_for_is_told(dashboard: Any) -> None:
    """Each metric, and each label by which its series are named or chosen."""
    text = exposed(make_sample(0), EVERYTHING)
    families = parser.text_string_to_metric_families(text)
    told = {one.name: {*one.labels} for family in families for one in family.samples}
    queries = [target for panel in dashboard["panels"] for target in panel.get("targets", ())]
    queries += [{"expr": one["definition"]} for one in dashboard["templating"]["list"][1:]]
    assert len(queries) > 30
    for query in queries:
        expression = query["expr"]
        metrics = re.findall(r"dataparallel_\w+", expression)
        assert metrics and not {*metrics} - {*told}, expression
        labels = {*re.findall(r"{{(\w+)}}", query.get("legendFormat", ""))}
        labels |= {*re.findall(r"(\w+)=~", expression)}
        labels |= {*re.findall(r"label_values\(\w+, (\w+)\)", expression)}
        for group in re.findall(r"(?:by|on) \(([\w, ]+)\)", expression):
            labels |= {*group.split(", ")}
        # Prometheus itself adds from which machine a series comes.
        assert labels - {"instance"} <= set.union(*(told[one] for one in metrics)), expression


def test_phases_have_the_colors_of_the_other_views(dashboard: Any) -> None:
    found = {
        override["matcher"]["options"]: override["properties"][0]["value"]["fixedColor"]
        for panel in dashboard["panels"]
        for override in panel.get("fieldConfig", {}).get("overrides", ())
    }
    assert found == {phase: DARK.phases[phase].color for phase in PHASES}


def test_panels_have_places_units_and_a_source_that_can_be_chosen(dashboard: Any) -> None:
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    source, *others = dashboard["templating"]["list"]
    assert (source["name"], source["type"], source["query"]) == (
        "datasource",
        "datasource",
        "prometheus",
    )
    taken: Counter[tuple[int, int]] = Counter()
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        taken.update(
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        )
        if panel["type"] != "row":
            assert panel["fieldConfig"]["defaults"]["unit"]
            assert {one["datasource"]["uid"] for one in (panel, *panel["targets"], *others)} == {
                "${datasource}"
            }
            assert len({one["refId"] for one in panel["targets"]}) == len(panel["targets"])
    assert set(taken.values()) == {1}
