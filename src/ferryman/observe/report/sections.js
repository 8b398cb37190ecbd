// The sections around the timeline: title, headline, where the time went, updates, and charts over the steps.

const lead = RANKS[0], facts = lead.facts, plan = facts.plan || {};
const highestPeak = DATA.together.device_peak; // over all ranks

// Title.

{
  byId("title").textContent = facts.model ? `${facts.model}, ${showCount(facts.parameters)} parameters` : DATA.name;
  const where = facts.virtual ? make("span", { class: "tag" }, `virtual accelerator (${facts.device})`)
    : facts.device ? make("span", {}, facts.device === "cpu" ? "CPU" : facts.device) : null;
  const parts = [
    RANKS.length > 1 || facts.ranks > 1 ? `${facts.ranks > RANKS.length ? `${RANKS.length} of ${facts.ranks}` : RANKS.length} ranks` : null,
    facts.budget ? `budget ${showBytes(facts.budget)}` : "no budget",
    facts.precision && facts.precision.length ? facts.precision.join(", ") : null,
    facts.optimizer || null,
    plan.units ? `${plan.units} units, ${plan.held ? "held on the device" : "relayed"}` : null,
    plan.updates ? `updates: ${plan.updates}, ${plan.deferred ? "deferred" : "eager"}` : null,
    facts.trained < facts.parameters ? `${showCount(facts.trained)} trained` : null,
  ];
  byId("facts").append(...[where].filter(Boolean), ...parts.filter(Boolean).map((part) => make("span", {}, part)));
  byId("footer").textContent = `Made from ${DATA.name}, recorded with ferryman${facts.version ? ` ${facts.version}` : ""}. The trace can also be opened in ui.perfetto.dev.`;
}

// Headline.

const RESOURCE_NAMES = { compute: "compute", "link in": "link in", "link out": "link out", "device updates": "updates on the device", host: "host", "other ranks": "exchange between ranks" };
const resourceName = (resource) => RESOURCE_NAMES[resource] || resource;

function figure(name, value, unit, more, share = null) {
  const meter = share === null ? null : make("div", { class: "meter", role: "img", "aria-label": showPercent(share) },
    make("i", { style: { width: `${Math.min(100, share * 100)}%` } }));
  return make("div", { class: "figure" }, make("div", { class: "name" }, name),
    make("div", { class: "value" }, value, unit ? make("small", {}, ` ${unit}`) : null), meter, make("div", { class: "more" }, more));
}
{
  const typical = lead.accounts[lead.typical], { busiest, share, bound } = typical.whole;
  const count = lead.steps.number.length;
  const thinned = facts.thinned ? `; of ${facts.thinned.steps} steps in total, every ${facts.thinned.every}th of the older ones` : "";
  const [time, unit] = lead.seconds === null ? ["–", ""] : showSeconds(lead.seconds).split(" ");
  const all = DATA.together;
  const rate = all.tokens_per_second !== null ? ["tokens", all.tokens_per_second] : all.samples_per_second !== null ? ["samples", all.samples_per_second] : null;
  const several = RANKS.length > 1 ? "rank 0: " : "";
  const inStep = (name) => RANKS.reduce((sum, rank) => sum + (rank.accounts[rank.typical][name] || 0), 0);
  const peak = highestPeak === null ? ["–", "", facts.device === "cpu" ? "the device is the CPU" : "not recorded"]
    : [...showBytes(highestPeak).split(" "), budget ? `${showPercent(highestPeak / budget)} of the budget of ${showBytes(budget)}` : "no budget"];
  const beyond = highestPeak !== null && budget && highestPeak > budget
    ? make("div", { class: "tag", role: "alert" }, `Warning: ${showBytes(highestPeak - budget)} above the budget. The peak includes tensors that your own code keeps on the device.`) : null;
  byId("headline").append(
    figure("Step time", time, unit, lead.seconds === null ? "no steps recorded" : `median of ${count} step${count === 1 ? "" : "s"}${count > 1 ? ", without the first" : ""}${thinned}`),
    figure("Throughput", rate ? digits(rate[1]) : "–", rate ? `${rate[0]}/s` : "", rate
      ? `${showCount(inStep(rate[0]))} ${rate[0]} per step, ${inStep("micro_batches")} micro-batch${inStep("micro_batches") === 1 ? "" : "es"}${RANKS.length > 1 ? ", all ranks" : ""}${callsOf()}` : "number of samples unknown"),
    figure(RANKS.length > 1 ? "Highest device memory peak" : "Device memory peak", peak[0], peak[1], make("span", {}, peak[2], beyond), highestPeak !== null && budget ? highestPeak / budget : null),
    figure(bound ? "Bounded by" : "Busiest", busiest ? resourceName(busiest) : "–", "", busiest
      ? `${several}busy for ${showPercent(share)} of the ${lead.has_steps ? "step" : "trace"}${bound ? "" : "; no resource is busy all the time"}${besides()}` : "no work recorded", busiest ? share : null),
  );
  /** How many calls kept their graph, so that their forward ran once. */
  function callsOf() {
    const kept = inStep("kept_calls"), calls = kept + inStep("recomputed_calls");
    return calls ? `; ${showCount(kept)} of ${showCount(calls)} calls not recomputed` : "";
  }
  /** A sentence about the rank that the others wait for, if there is one. */
  function besides() {
    const slow = RANKS.find((rank) => rank.rank === all.slowest_rank);
    if (!slow) return "";
    if (slow === lead) return "; the other ranks wait for it";
    const { busiest: what, share: much } = slow.accounts[slow.typical].whole;
    return `; the other ranks wait for rank ${slow.rank} (${resourceName(what)} ${showPercent(much)})`;
  }
}

// Steps.

const stepSelect = byId("step");
lead.accounts.forEach((account, i) => stepSelect.append(make("option", { value: i }, lead.has_steps ? `step ${account.number}` : "whole trace")));
function choose(index) {
  chosen = Math.max(0, Math.min(lead.accounts.length - 1, index));
  stepSelect.value = `${chosen}`;
  byId("previous").disabled = chosen === 0;
  byId("next").disabled = chosen === lead.accounts.length - 1;
  pointed = cursor = null;
  const each = RANKS.length > 1 ? RANKS.map((rank, place) => ({ name: `rank ${rank.rank}`, ink: levelInk(place), dash: "solid" })) : [];
  if (hasMemory) byId("memory-title").replaceChildren("Device memory", ...[...each, ...levels()].map(({ name, bytes, ink, dash }) =>
    make("span", { class: "key" }, make("i", { style: { borderColor: `var(--${ink})`, borderTopStyle: dash } }), bytes === undefined ? name : `${name} ${showBytes(bytes)}`)));
  wholeStep();
  showWhere();
  showSplitOf();
  repaint();
}
const chooseNumber = (number) => {
  const index = lead.accounts.findIndex((account) => account.number === number);
  if (index >= 0) choose(index);
};
stepSelect.addEventListener("change", () => choose(Number(stepSelect.value)));
byId("previous").addEventListener("click", () => choose(chosen - 1));
byId("next").addEventListener("click", () => choose(chosen + 1));
if (!lead.has_steps) byId("reset").textContent = "Reset";

// Legend, and a message where there are no memory samples.

function legend(entries) {
  return entries.map(([name, text]) => make("li", {}, make("i", { style: { background: `var(--${name})` } }), text));
}
{
  const used = new Set(RANKS.flatMap((rank) => rank.labels.map((label) => label.kind)));
  byId("legend").append(...legend(Object.entries(KINDS).filter(([kind]) => used.has(kind))));
  if (!hasMemory) {
    memoryCanvas.hidden = true;
    byId("memory-missing").hidden = false;
    byId("memory-missing").textContent = facts.device === "cpu"
      ? "Not shown: the device is the CPU." : "This trace has no samples of device memory.";
  } else {
    memoryCanvas.setAttribute("role", "img");
    memoryCanvas.setAttribute("aria-label", `Device memory over time; peak ${showBytes(highestPeak || 0)}${budget ? `, budget ${showBytes(budget)}` : ""}`);
  }
}
if (account && highestPeak) {
  const inks = { "weight slots": "weights", "gradient slots": "gradients", residents: "stash", "update staging": "update",
    "state on the device": "state", "gradients on the device": "check" };
  const parts = Object.entries(account).map(([name, bytes]) => [inks[name] || "other", name, bytes]).filter(([, , bytes]) => bytes);
  parts.push(["forward", "micro-batches at the peak", Math.max(0, highestPeak - fixed)]);
  const whole = Math.max(budget || 0, highestPeak);
  const strip = make("div", { class: "strip" }, ...parts.map(([ink, name, bytes]) =>
    make("i", { title: name, style: { width: `${(bytes / whole) * 100}%`, background: `var(--${ink})` } })));
  const entries = legend(parts.map(([ink, name, bytes]) => [ink, `${name} ${showBytes(bytes)}`]));
  if (budget > highestPeak) entries.push(...legend([["row", `free ${showBytes(budget - highestPeak)}`]]));
  byId("holds").append(make("div", { class: "holds" }, make("h3", {}, "What takes the memory"), strip, make("ul", { class: "legend" }, ...entries)));
}

// Where the time went.

const ADVICE = {
  compute: "The link and the host keep up: only less work, a lower precision or a faster device would make the step shorter.",
  "link in": "Copies to the device do not keep up with compute. With more micro-batches per step each fetch serves more work; with more device memory more units stay there; bf16 halves the bytes.",
  "link out": "Copies to the host do not keep up with compute. With more micro-batches per step each flush serves more work; with more device memory the stash stays on the device; bf16 halves the bytes.",
  "device updates": "Updates on the device are the slowest part: another policy (updates=\"host\" or \"stride:K\") leaves more of them to the host.",
  "other ranks": "This rank exchanges gradients with other ranks or waits for them: check whether another rank has more work. If none has, use more micro-batches per step, so that each exchange serves more work, or bf16, which halves the bytes.",
  host: "Updates on the host do not keep up. updates=\"auto\" lets the device share them; more host threads or more micro-batches per step also help.",
};
const WAITING = "No resource is busy all the time: lanes wait for one another. Look for gaps in the compute lane, and for the work in another lane that ends where a gap ends.";

function showWhere() {
  const target = byId("where");
  target.replaceChildren();
  for (const rank of RANKS) {
    const account = accountOf(rank);
    if (!account) continue;
    const what = [verdict(account), phases(account), make("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": "Lanes" }, table(rank, account))];
    const slow = rank.rank === DATA.together.slowest_rank;
    if (RANKS.length === 1) target.append(...what);
    else target.append(make("details", rank === lead || slow ? { open: "" } : {}, make("summary", {}, `rank ${rank.rank}${slow ? ", which the other ranks wait for" : ""}`), ...what));
  }
}
function verdict(account) {
  const { busiest, share, bound, start, end } = account.whole;
  if (!busiest) return make("p", { class: "verdict" }, "No work was recorded.");
  const what = lead.has_steps ? `step ${account.number}` : "the trace";
  const name = resourceName(busiest);
  return make("p", { class: "verdict" },
    make("b", {}, `${name[0].toUpperCase()}${name.slice(1)} ${bound ? "bounds" : "is the busiest resource of"} ${what}`),
    `: it is busy for ${showPercent(share)} of ${showMicro(end - start)}. `, bound ? ADVICE[busiest] || "" : WAITING);
}
function phases(account) {
  if (!account.phases.length) return "";
  const strip = make("div", { class: "strip" }), list = make("ul", { class: "legend", "aria-label": "Phases of the step" });
  const inks = { forward: "forward", backward: "backward", finish: "check" };
  for (const phase of account.phases) {
    const length = phase.end - phase.start, background = `var(--${inks[phase.name]})`;
    if (length <= 0) continue;
    const who = phase.bound ? `bounded by ${resourceName(phase.bound)}, ${showPercent(phase.share)}`
      : phase.busiest ? `${resourceName(phase.busiest)} ${showPercent(phase.share)}, not bounded` : "no work";
    strip.append(make("i", { title: phase.name, style: { background, flex: `${length} 1 0` } }));
    list.append(make("li", {}, make("i", { style: { background } }), make("b", {}, phase.name), ` ${showMicro(length)}, ${who}`));
  }
  return make("div", { class: "phases" }, strip, list);
}
function table(rank, account) {
  const length = (account.whole.end - account.whole.start) / 1e6;
  const head = make("tr", {}, ...[["lane"], ["contents", "about"], ["busy time by kind of work", "use"], ["busy", "number"], ["share", "number"], ["transferred", "number"], ["rate", "number"]]
    .map(([text, kind]) => make("th", { scope: "col", class: kind || "" }, text)));
  const body = [];
  let before = null;
  for (const lane of rank.lanes) {
    const used = account.lanes[lane.name] || { busy: 0, kinds: {}, bytes: 0 };
    const strip = make("div", { class: "strip" });
    for (const kind of Object.keys(KINDS)) {
      if (!used.kinds[kind]) continue;
      strip.append(make("i", { title: `${KINDS[kind]}: ${showSeconds(used.kinds[kind])}`,
        style: { width: `${(used.kinds[kind] / length) * 100}%`, background: `var(--${kind})` } }));
    }
    const crosses = lane.resource.startsWith("link") && used.bytes > 0, moves = crosses || (lane.resource === "other ranks" && used.bytes > 0);
    body.push(make("tr", { class: before !== null && before !== lane.resource ? "first" : "" },
      make("td", { class: "lane" }, lane.name), make("td", { class: "about" }, LANES[lane.name] || ""), make("td", { class: "use" }, strip),
      make("td", { class: "number" }, used.busy ? showSeconds(used.busy) : "–"), make("td", { class: "number" }, showPercent(used.busy / length)),
      make("td", { class: "number" }, moves ? showTraffic(used.bytes) : "–"),
      make("td", { class: "number" }, crosses && used.busy ? showRate(used.bytes / used.busy) : "–")));
    before = lane.resource;
  }
  return make("table", {}, make("thead", {}, head), make("tbody", {}, ...body));
}

// Updates.

const splitNote = make("p", { class: "verdict" });
function showSplitOf() {
  const s = lead.steps, i = s.number.indexOf(lead.accounts[chosen].number);
  if (i < 0 || s.device_share[i] === null) {
    splitNote.textContent = "The updates of this step are not in the trace: it was saved before they were complete.";
    return;
  }
  const late = s.host_waited[i] > s.device_waited[i] ? "the device" : "the host";
  splitNote.replaceChildren(
    make("b", {}, `${showPercent(s.device_share[i])} on the device, ${showPercent(1 - s.device_share[i])} on the host`),
    ` in step ${s.number[i]} (updates=${s.policy[i]}). For the updates, ${showTraffic(s.bytes_in[i])} came in and ${showTraffic(s.bytes_out[i])} went out; `,
    s.device_share[i] > 0 && s.device_share[i] < 1 ? `${late} finished last, ${showSeconds(Math.max(s.host_waited[i], s.device_waited[i]))} after the other.` : `all by ${late}.`,
  );
}
{
  const s = lead.steps;
  if (!s.number.length || s.device_share.every((share) => share === null)) {
    byId("split").append(make("p", { class: "missing" }, facts.optimizer === null ? "The engine had no optimizer, so nothing was updated."
      : "This trace has no updates: no step was recorded completely."));
  } else {
    const rates = [{ name: "achieved", values: s.achieved_rate, color: "accent" }, { name: "predicted", values: s.predicted_rate, color: "soft", dashed: true }];
    byId("split").append(splitNote, make("div", { class: "pair" },
      lineChart("Share updated on the device", s.number, [{ name: "device", values: s.device_share, color: "update", area: true }],
        { show: showPercent, low: 0, high: 1, choose: chooseNumber }),
      lineChart("Update rate (parameters per second)", s.number, rates.filter((line) => line.values.some((value) => value !== null)), { show: showCount, low: 0, choose: chooseNumber })));
  }
}

// Charts over the steps.

{
  const s = lead.steps;
  if (!s.number.length) byId("course").append(make("p", { class: "missing" }, "No steps were recorded, so there is no loss to show."));
  else {
    if (s.loss.some((loss) => loss !== null)) {
      const lost = s.loss.filter((loss) => loss === null).length;
      byId("course").append(lineChart(lost ? `Loss (not finite in ${lost} steps)` : "Loss", s.number, [{ name: "loss", values: s.loss, color: "accent" }], { show: (loss) => loss.toPrecision(4), choose: chooseNumber }));
    } else byId("course").append(make("p", { class: "missing" }, "The losses of these steps are not in the trace."));
    byId("course").append(lineChart("Step time", s.number, [{ name: "step time", values: s.seconds, color: "weights", area: true }], { show: showSeconds, low: 0, choose: chooseNumber }));
  }
}

choose(lead.typical);
new ResizeObserver(repaint).observe(document.body);
