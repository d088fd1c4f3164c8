"""What reads runs: status, comparisons, reports, evaluation, drills."""
