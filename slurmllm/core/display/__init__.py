"""What people look at: tables, progress bars and pictures."""
