"""Forecasts of river levels."""
