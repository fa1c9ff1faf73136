"""Teams in processes of their own, what this library is measured beside, and pages about it."""
