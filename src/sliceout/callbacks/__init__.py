"""Schedules for those who do not write their own training loop: one thin file per framework, imported only by name.

Redrawing needs no callback: slices follow the optimizer whoever calls it.
"""
