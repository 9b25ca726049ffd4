"""Work that runs beside or before the service: archiving, retraining, replays, imports, reports, load tests."""
