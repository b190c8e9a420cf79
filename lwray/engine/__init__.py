"""HOW a step runs: the loop, precision, optimisers, schedules, backends. It knows neither Ray nor MLflow."""
