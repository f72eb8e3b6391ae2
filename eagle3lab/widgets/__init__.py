"""Thin ipywidgets around `eagle3lab.plots`; callback logic is in pure functions."""
