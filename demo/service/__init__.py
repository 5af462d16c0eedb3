"""Schedules drawings and estimates how long they take."""
