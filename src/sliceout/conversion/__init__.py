"""From any model to a sliced one: dry run, trace, groups, recipes, report, profitability, and the verb ``convert_``."""
