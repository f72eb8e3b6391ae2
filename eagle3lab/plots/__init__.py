"""Figures: pure functions from data to matplotlib `Figure`, with the plotted data beside them."""
