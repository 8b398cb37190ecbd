"""One self-contained HTML file from a trace: `recording.py` reads it, `figures.py` counts, `page.py` writes."""

from ferryman.observe.report.page import write_report

__all__ = ["write_report"]
