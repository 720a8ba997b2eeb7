"""What the demo leaves to look at: the table as csv, and delays by hour of the day as a picture."""

from datetime import UTC, datetime
from pathlib import Path
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
import pyarrow.csv

from spark_ledger.demo.flights import GROUP

NEW_YORK = ZoneInfo("America/New_York")
AIRPORTS = {"EWR": "Newark", "JFK": "Kennedy", "LGA": "LaGuardia"}


def local_hour(hour_utc: str) -> int:
    moment = datetime.strptime(hour_utc, "%Y-%m-%dT%H").replace(tzinfo=UTC)
    return moment.astimezone(NEW_YORK).hour


def mean_by_hour(table: pa.Table, origin: str) -> tuple[np.ndarray, np.ndarray]:
    """(hours of the day with flights, mean delay in minutes of what arrived) of one airport."""
    rows = [row for row in table.to_pylist() if row["origin"] == origin and row["arrived"]]
    arrived = np.zeros(24)
    minutes = np.zeros(24)
    for row in rows:
        hour = local_hour(row["hour_utc"])
        arrived[hour] += row["arrived"]
        minutes[hour] += row["arrived"] * row["mean_delay"]
    hours = np.flatnonzero(arrived)
    return hours, minutes[hours] / arrived[hours]


def save(table: pa.Table, folder: Path) -> dict[str, Path]:
    """Writes delays.csv and delays.png and returns where they are, by what they are."""
    table = table.sort_by([(name, "ascending") for name in GROUP])
    csv = folder / "delays.csv"
    pa.csv.write_csv(table, csv)
    picture = folder / "delays.png"
    _draw(table, picture)
    return {"table": csv, "picture": picture}


def _draw(table: pa.Table, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5), dpi=120)
    for origin, name in AIRPORTS.items():
        hours, minutes = mean_by_hour(table, origin)
        axes.plot(hours, minutes, marker="o", label=f"{name} ({origin})")
    total = sum(table["flights"].to_pylist())
    axes.set_title(f"{total:,} flights out of New York, 2013: the later in the day, the later")
    axes.set_xlabel("scheduled departure, hour of the day in New York")
    axes.set_ylabel("mean delay at arrival, minutes")
    axes.axhline(0, color="grey", linewidth=0.8)
    axes.set_xticks(range(4, 25, 2))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
