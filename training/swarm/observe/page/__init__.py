"""The run's web page: a folder of static files that is refreshed during the run."""
