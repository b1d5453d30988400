"""The router: one OpenAI-compatible address in front of a plan's pipelines, and streams that outlive an engine.

`settings` what it is told, `service` the process, `app` the HTTP service, `targets` which pipelines live and whose turn
it is, `fields` what a request may hold and how it survives, `requests` a request as work to do, `sequence` the chain of
attempts behind one answer, `engine` one attempt on one engine, `text` the text around a cut, `deltas` parts of answers,
`answers` what clients are sent, `journal` what is remembered, `metrics` what is counted, `handover` how streams leave a
pipeline, `membership` which pipelines there are, `demand` what is asked of them, `admin` a client for who changes them.
"""
