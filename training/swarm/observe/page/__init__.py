"""The run's page: one folder of static files, refreshed while the run goes on."""
