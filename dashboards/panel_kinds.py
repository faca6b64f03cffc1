"""The kinds of panels of the dashboard, and the queries that they show."""

PROMETHEUS = {"type": "prometheus", "uid": "${datasource}"}
SERIES = 'instance=~"$instance"'
WIDTH = 24


def series(metric: str, *labels: str) -> str:
    return f"{metric}{{{','.join([SERIES, *labels])}}}"


def rate(metric: str, *labels: str) -> str:
    return f"rate({series(metric, *labels)}[$__rate_interval])"


def increase(metric: str) -> str:
    return f"increase({series(metric)}[$__rate_interval])"


def total(metric: str, *labels: str, by: str = "") -> str:
    """A rate per second over all chosen servers, or one for each value of a label."""
    return f"sum{f' by ({by})' if by else ''} ({rate(metric, *labels)})"


def now(metric: str, *labels: str, by: str = "") -> str:
    return f"sum{f' by ({by})' if by else ''} ({series(metric, *labels)})"


def quantile(q: float, metric: str) -> str:
    return f"histogram_quantile({q}, sum by (le) ({rate(metric + '_bucket')}))"


def quantiles(metric: str) -> list:
    return [(f"p{round(q * 100)}", quantile(q, metric)) for q in (0.5, 0.9, 0.99)]


def mean(metric: str, *labels: str, by: str = "") -> str:
    return f"{total(metric + '_sum', *labels, by=by)} / {total(metric + '_count', *labels, by=by)}"


def share(part: str, whole: str) -> str:
    return f"{part} / {whole}"


class Panel:
    def __init__(self, title, about, *queries, unit="short", width=8, height=7, **options):
        """`queries` are pairs of a legend and an expression."""
        self.title, self.about, self.queries = title, about, queries
        self.unit, self.width, self.height, self.options = unit, width, height, options

    def model(self, place: dict, number: int) -> dict:
        return {
            "id": number,
            "type": self.TYPE,
            "title": self.title,
            "description": self.about,
            "datasource": PROMETHEUS,
            "gridPos": place,
            "targets": [
                {
                    "refId": chr(ord("A") + index),
                    "datasource": PROMETHEUS,
                    "expr": expression,
                    "legendFormat": legend,
                    **self.query_options(),
                }
                for index, (legend, expression) in enumerate(self.queries)
            ],
            "fieldConfig": {"defaults": {"unit": self.unit, **self.defaults()}, "overrides": self.overrides()},
            "options": self.panel_options(),
        }

    def query_options(self) -> dict:
        return {"range": True, "instant": False}

    def defaults(self) -> dict:
        return {"color": {"mode": "palette-classic"}}

    def overrides(self) -> list:
        return []


class Lines(Panel):
    """Options: `stacked`; `below`, legends that are drawn downwards; `colours` by legend."""

    TYPE = "timeseries"

    def defaults(self):
        stacked = self.options.get("stacked", False)
        custom = {
            "drawStyle": "line",
            "lineWidth": 1,
            "fillOpacity": 35 if stacked else 8,
            "showPoints": "never",
            "spanNulls": True,
            "stacking": {"mode": "normal" if stacked else "none", "group": "A"},
        }
        limits = {} if self.options.get("below") else {"min": 0}
        return {**super().defaults(), **limits, "custom": custom}

    def overrides(self):
        def of(legend, properties):
            return {"matcher": {"id": "byName", "options": legend}, "properties": properties}

        colours = self.options.get("colours", {})
        drawn = [
            of(legend, [{"id": "color", "value": {"mode": "fixed", "fixedColor": colour}}])
            for legend, colour in colours.items()
        ]
        down = [
            of(legend, [{"id": "custom.transform", "value": "negative-Y"}]) for legend in self.options.get("below", ())
        ]
        return drawn + down

    def panel_options(self):
        legend = {"displayMode": "table", "placement": "bottom", "showLegend": True, "calcs": ["lastNotNull", "max"]}
        return {"legend": legend, "tooltip": {"mode": "multi", "sort": "desc"}}


class Figure(Panel):
    """One number. Options: `warn` and `bad`, from which on it is yellow and red."""

    TYPE = "stat"

    def __init__(self, *args, width=3, height=4, **options):
        super().__init__(*args, width=width, height=height, **options)

    def defaults(self):
        steps = [{"color": "green", "value": None}]
        for colour, bound in (("yellow", self.options.get("warn")), ("red", self.options.get("bad"))):
            if bound is not None:
                steps.append({"color": colour, "value": bound})
        return {"color": {"mode": "thresholds"}, "thresholds": {"mode": "absolute", "steps": steps}}

    def panel_options(self):
        return {
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
            "colorMode": "value",
            "graphMode": "area",
            "justifyMode": "auto",
            "orientation": "auto",
            "textMode": "auto",
            "wideLayout": True,
        }


class Heat(Panel):
    """A histogram over time."""

    TYPE = "heatmap"

    def query_options(self):
        return {"range": True, "instant": False, "format": "heatmap"}

    def defaults(self):
        return {"custom": {"scaleDistribution": {"type": "linear"}}}

    def panel_options(self):
        return {
            "calculate": False,
            "cellGap": 1,
            "color": {
                "mode": "scheme",
                "scheme": "Spectral",
                "exponent": 0.5,
                "fill": "dark-orange",
                "reverse": False,
                "steps": 64,
            },
            "exemplars": {"color": "rgba(255,0,255,0.7)"},
            "filterValues": {"le": 1e-9},
            "legend": {"show": True},
            "rowsFrame": {"layout": "auto"},
            "showValue": "never",
            "tooltip": {"mode": "single", "yHistogram": False, "showColorScale": False},
            "yAxis": {"axisPlacement": "left", "reverse": False, "unit": self.unit},
        }


class Table(Panel):
    """The labels of a series that is always 1."""

    TYPE = "table"

    def query_options(self):
        return {"range": False, "instant": True, "format": "table"}

    def panel_options(self):
        return {"showHeader": True, "cellHeight": "sm"}
