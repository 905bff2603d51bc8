"""What `fctl COMMAND --help` shows as examples: one a line, as it is typed, each under its own command."""

FCTL = """\
fctl scale chat 3
fctl scale chat auto                     as forebay.toml says
fctl scale chat 2 --version v2
fctl update model=chat replicas=3 batch=hold
fctl update job=12 priority=500 time=2-0
fctl doctor                              what in this Slurm would slow reclaiming
fctl doctor --json
fctl rebuild                             on the accounting host
fctl key create --team physics --user ada --tiers interactive,batch --expires now+30days
fctl key list
fctl key revoke 0123456789ab
fctl explain                             the broker, its last plan, and every model
fctl explain chat                        why the model's replicas are as they are
fctl resume n3                           use a drained node again
fctl resume chat                         end a model's quarantine
fctl hold batch                          keep batch off everything
fctl hold chat                           keep batch off a model
fctl hold 12,13_4                        batch jobs
fctl release batch
fctl release 12,13_4
fctl rate show chat
fctl rate show -a -P -o model,tier,of,price
fctl adjust physics -12.50 --month 2026-11 --reason 'outage of the 3rd'
fctl close-month 2026-11 --reason 'sent to all teams'
fctl quota set team=physics tokens_per_day=20M
fctl quota rm team=physics tokens_per_day
fctl quota show team=physics
fctl quota history
fctl requeue 12,13_4
fctl top 12
fctl cordon n[3-4] fan noise
fctl uncordon n[3-4]
fctl schedule add morning --model chat --floor 8 --cron '0 8 * * mon-fri' --until 18:00
fctl schedule list
fctl schedule history morning            was it warm when it began?
fctl schedule next morning -n 3
fctl schedule pause morning
fctl schedule resume morning
fctl schedule rm morning
fctl weights list n3
fctl weights stage chat --version v2     before a replica wants them
fctl weights stage s3://models/chat-v2 --node n3
fctl weights rm chat --version v1
fctl weights verify chat
fctl weights check file:///weights/chat-v2
fctl weights manifest file:///weights/chat-v2 --write
fctl lease --render --kind backfill --gpus 4
fctl lease --render --profile h100
fctl model update chat tiers=[interactive] scaling.floor=3
fctl model rm chat --dry-run
fctl model show chat
fctl model list
fctl version update chat v2 seats=64 engine_args.block-size=32
fctl version rm chat v1
fctl version show chat v2
fctl version list chat
fctl route update chat v1=95 v2=5
fctl route show chat
fctl route list
fctl adapter update chat law rank=32
fctl adapter rm chat law
fctl adapter show chat law
fctl adapter list chat
fctl profile update h100 memory_gb=400
fctl profile rm h100
fctl profile show h100
fctl profile list
fctl apply -f models.yaml --dry-run
fctl apply -f models.yaml --prune --reason 'spring cleaning'
fctl history chat -n 5
fctl revert 41 --dry-run
fctl rollback chat --reason 'answers are cut off'
fctl gate chat pass
fctl gate chat fail --reason 'worse on arithmetic'
"""
