"""What all examinations share: findings, the examiner, options, the report."""
