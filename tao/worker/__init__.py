"""The worker: leases background jobs from leaders and does them page by page, through the SDK."""
