// The page is complete without this script: it sorts and filters the groups.
"use strict";
const controls = document.querySelector(".controls"), list = document.getElementById("list");
if (controls && list) {
  const groups = [...list.children], texts = new Map(groups.map(group => [group, group.textContent.toLowerCase()]));
  const of = name => controls.querySelector(`[name=${name}]`), value = (group, name) => Number(group.dataset[name] || "-Infinity");
  const orders = {
    step: (a, b) => groups.indexOf(a) - groups.indexOf(b), highest: (a, b) => value(b, "mean") - value(a, "mean"),
    lowest: (a, b) => value(a, "mean") - value(b, "mean"), widest: (a, b) => value(b, "std") - value(a, "std"),
  };
  const refresh = () => {
    const fits = group => ["step", "source"].every(name => !of(name).value || group.dataset[name] === of(name).value)
      && (!of("verdict").value || group.dataset.verdicts.split("\n").includes(of("verdict").value))
      && texts.get(group).includes(of("text").value.toLowerCase());
    groups.forEach(group => { group.hidden = !fits(group); });
    list.append(...[...groups].sort(orders[of("order").value]));
    of("count").textContent = `${groups.filter(group => !group.hidden).length} of ${groups.length} groups`;
  };
  controls.addEventListener("input", refresh);
  controls.hidden = false;
  refresh();
}
