"""What a person does with the package: one module per task, mostly called as its command.

Training: `adapt`, `choose`, `repair`, `labels` (labels that look wrong), `speed`; `classifier` is
`dear.Classifier`, and `inputs` what it may be given.

Answering: `evaluate`, `explain`, `retrieve`, `drift`, `embed` in `shards`; `examine` measures a run, and
`head_evidence` a role map, for their pages.

Auditing: `audit` puts together what the images tell (`audit_photos`) and what a model does (`audit_model`);
`audit_page` shows it. `demo` tells all of it on the embedded world, in `demo_parts` and `demo_heads`.
"""
