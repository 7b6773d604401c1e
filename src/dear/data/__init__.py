"""Pictures and labels from folders, tables, benchmark layouts and the attribute world."""
