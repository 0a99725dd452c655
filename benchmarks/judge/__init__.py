"""Is A faster than B? One answer with one error rate, for whatever says so."""
