"""Turns a trace into one self-contained HTML file."""

from ferryman.observe.report.page import write_report

__all__ = ["write_report"]
