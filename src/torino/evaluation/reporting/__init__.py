"""Reports and figures of evaluation runs."""
