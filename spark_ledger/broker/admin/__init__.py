"""The verbs of the admin API: what `/admin/v2` answers, and to whom."""
