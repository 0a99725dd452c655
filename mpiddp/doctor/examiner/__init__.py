"""The examiner, which all stages use, and what it deals in: findings, options, the report."""
