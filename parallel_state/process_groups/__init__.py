"""Creates torch process groups. Ranks first agree that they request the same group. Equal groups are shared."""
