"""Programs that measure. Everything the documents quote comes from ``results/*.json``, which these write."""
