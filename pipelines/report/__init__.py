"""Evaluations compared: tables, charts and the page."""
