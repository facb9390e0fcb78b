{{ join(export.deployment.command) }}
