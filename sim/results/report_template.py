"""The page around the figures: style, behaviour, skeleton. Everything is inline; the page is forbidden to load anything."""

from __future__ import annotations

STYLE = """
:root{--ink:#1f2933;--soft:#52606d;--line:#e3e8ef;--card:#fff;--page:#f5f7fa;--good:#00795a;--strained:#9a5b00;--bad:#b3261e;
--accent:#0072b2}
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,Helvetica,Arial,sans-serif}
main{max-width:1200px;margin:0 auto;padding:28px 24px 40px}
h1{font-size:1.7rem;line-height:1.25;margin:.45rem 0 .35rem;letter-spacing:-.01em}
h2{font-size:1.12rem;margin:0 0 .15rem}
h3{font-size:.95rem;margin:0}
p{margin:.25rem 0}
.soft{color:var(--soft)}
.small{font-size:.85rem}
.eyebrow{display:flex;flex-wrap:wrap;gap:.3rem .9rem;color:var(--soft);font-size:.88rem}
.eyebrow b{color:var(--accent);letter-spacing:.02em}
.answer{background:var(--card);border:1px solid var(--line);border-left:6px solid var(--accent);border-radius:12px;padding:20px 24px}
.answer.good{border-left-color:var(--good)}.answer.strained{border-left-color:#e69f00}.answer.bad{border-left-color:#d55e00}
.good h1{color:var(--good)}.strained h1{color:var(--strained)}.bad h1{color:var(--bad)}
.answer .headline{font-size:1.08rem;max-width:72ch}
.limit{margin-top:.7rem;padding-top:.7rem;border-top:1px solid var(--line)}
.warnings{margin:.8rem 0 0;padding:.7rem 1rem .7rem 2rem;background:#fff7e6;border:1px solid #f3d9a4;border-radius:8px}
.tiles{display:grid;grid-template-columns:repeat(auto-fill,minmax(178px,1fr));gap:12px;margin:16px 0}
.tile{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:12px 14px}
.tile .label{color:var(--soft);font-size:.82rem}
.tile .value{font-size:1.4rem;font-weight:650;font-variant-numeric:tabular-nums;letter-spacing:-.01em;white-space:nowrap}
.tile .note{color:var(--soft);font-size:.82rem}
.card{background:var(--card);border:1px solid var(--line);border-radius:12px;padding:18px 22px;margin:16px 0}
.panels{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,300px),1fr));gap:8px 24px;margin-top:.8rem}
.panels.wide{grid-template-columns:repeat(auto-fill,minmax(min(100%,460px),1fr))}
.panels>div{min-width:0}
.panels+.scroll{margin-top:.8rem}
.plot{width:100%;min-width:0}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums;font-size:.88rem}
th,td{text-align:right;padding:.38rem .6rem;border-bottom:1px solid var(--line);vertical-align:top;white-space:nowrap}
th{color:var(--soft);font-weight:600}
th.text,td.text{text-align:left}
td.wrap{white-space:normal;min-width:16rem}
td svg{display:block;margin-left:auto}
b.good{color:var(--good)}b.strained{color:var(--strained)}b.bad{color:var(--bad)}
tbody tr:last-child td{border-bottom:0}
.bar{position:relative;height:1.15rem;min-width:7rem;background:#f0f3f7;border-radius:3px}
.bar i{position:absolute;top:0;bottom:0;border-radius:3px;min-width:2px;background:#8fa1b5;
print-color-adjust:exact;-webkit-print-color-adjust:exact}
.bar i.outside{background:#c3ccd8}.bar i.pool{background:var(--accent)}.bar i.total{background:#3e4c59}
.waterfall td:nth-child(2){width:44%}
.waterfall .formula{color:var(--soft);font-size:.8rem;white-space:normal;overflow-wrap:anywhere}
dl{display:grid;grid-template-columns:minmax(8rem,max-content) 1fr;gap:.3rem 1.2rem;margin:.6rem 0 0;font-size:.9rem}
dt{font-weight:600}dd{margin:0;overflow-wrap:anywhere}
pre{margin:.5rem 0 0;padding:.6rem .8rem;background:#f0f3f7;border-radius:6px;font-size:.84rem;
white-space:pre-wrap;overflow-wrap:anywhere}
@media (max-width:640px){main{padding:14px 12px 28px}.answer,.card{padding:14px 14px}h1{font-size:1.35rem}
.tiles{grid-template-columns:1fr 1fr;gap:8px}.tile{padding:10px}.tile .value{font-size:1.15rem}
.waterfall th,.waterfall td{padding:.38rem .3rem}.waterfall td.wrap{min-width:0}
.waterfall td:nth-child(2){width:28%}.waterfall .bar{min-width:4.5rem}
dl{grid-template-columns:1fr;gap:0}dd{margin-bottom:.45rem}}
@media print{body{background:#fff;font-size:12px}main{max-width:none;padding:0}.card,.answer,.tile{break-inside:avoid}
.modebar{display:none!important}.scroll{overflow:visible}}
"""
"""Style sheet of the report."""

SCRIPT = """
(function () {
  var figures = JSON.parse(document.getElementById('figures').textContent);
  var linked = ['memory', 'queue', 'batch', 'device'].filter(function (name) { return figures[name]; });
  var config = {responsive: true, displaylogo: false, displayModeBar: 'hover',
    modeBarButtons: [['zoom2d', 'pan2d', 'resetScale2d', 'toImage']]};
  Object.keys(figures).forEach(function (name) {
    Plotly.newPlot('plot-' + name, figures[name].data, figures[name].layout, config);
  });
  /* The time lines share their x axis: zooming one zooms all. */
  var busy = false;
  linked.forEach(function (name) {
    document.getElementById('plot-' + name).on('plotly_relayout', function (change) {
      if (busy) { return; }
      var update = {};
      if (change['xaxis.range[0]'] !== undefined) {
        update = {'xaxis.range[0]': change['xaxis.range[0]'], 'xaxis.range[1]': change['xaxis.range[1]']};
      } else if (change['xaxis.autorange']) {
        update = {'xaxis.autorange': true};
      } else { return; }
      busy = true;
      Promise.all(linked.filter(function (other) { return other !== name; }).map(function (other) {
        return Plotly.relayout('plot-' + other, update);
      })).then(function () { busy = false; }, function () { busy = false; });
    });
  });
  window.addEventListener('beforeprint', function () {
    Object.keys(figures).forEach(function (name) { Plotly.Plots.resize('plot-' + name); });
  });
})();
"""
"""Draws the figures, links the time axes, and fits the figures to the paper when printed."""

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>
{body}
</main>
<script>{library}</script>
<script type="application/json" id="figures">{figures}</script>
<script>{script}</script>
</body>
</html>
"""
"""The skeleton. `title` and `body` are escaped by their makers; the policy forbids every request the page could make."""

DEFINITIONS = {
    "TTFT": "Time to first token: from the request's arrival to its first output token; queueing is part of it.",
    "TPOT": (
        "Time per output token: (E2EL - TTFT) / (output tokens - 1), one value a request. "
        "Requests with a single output token have none, and count as 0 in goodput."
    ),
    "ITL": "Inter-token latency: every gap between two successive output tokens, over all requests.",
    "E2EL": "End-to-end latency: from arrival to the last output token.",
    "Queue": "Time from arrival to the first time the request was scheduled.",
    "Percentiles": (
        "Over finished requests only, by linear interpolation between order statistics. TTFT, TPOT, ITL, E2EL and "
        "percentiles are defined as in vllm bench serve."
    ),
    "Goodput": "Requests a second whose own TTFT, TPOT and E2EL are all within the objectives.",
    "KV usage": (
        "Blocks held by requests, as a share of the pool; the mean is weighted by time. Cached blocks that no request holds are not "
        "usage: they are given up when blocks run short."
    ),
    "Prefix hit rate": "Prompt tokens found in the KV cache as a share of all prompt tokens that looked there.",
    "Preemption": "A running request loses its blocks to another and is computed again later; the tokens it repeats are recomputed.",
    "Limit": "What kept requests waiting for most of the time during which any waited.",
}
"""The metrics in words, as the report prints them."""
