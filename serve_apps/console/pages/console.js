// The pages are complete without this script: it keeps what is marked data-live up to date (but where a
// text is selected), and sends a form when a choice changes.
"use strict";
const SOON = 500, LATER = 1000, said = document.getElementById("connection");
let stamp = document.body.dataset.stamp;

const key = node => node.id || node.querySelector(":scope > summary")?.textContent;

function replace(old, fresh) {
  const open = new Map([...old.querySelectorAll("details")].map(node => [key(node), node.open]));
  fresh.querySelectorAll("details").forEach(node => { if (open.has(key(node))) node.open = open.get(key(node)); });
  if (old.isEqualNode(fresh)) return;
  const focused = old.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
  const places = [...old.querySelectorAll(".scroll")].map(node => [node.scrollLeft, node.scrollTop]);
  old.replaceWith(document.adoptNode(fresh));
  fresh.querySelectorAll(".scroll").forEach((node, k) => { if (places[k]) [node.scrollLeft, node.scrollTop] = places[k]; });
  if (focused) fresh.querySelector(`a[href="${CSS.escape(focused)}"]`)?.focus({preventScroll: true});
}

async function look() {
  let pause = SOON;
  try {
    if (document.hidden) return;
    const answer = await fetch(location.href, {headers: {"If-None-Match": stamp}, cache: "no-store"});
    said.textContent = answer.status === 401 ? "the console was started anew: open the address that it printed" : "";
    if (answer.status !== 200) return;
    pause = LATER;
    const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
    const selection = getSelection(), held = old => !selection.isCollapsed && selection.containsNode(old, true);
    const live = [...document.querySelectorAll("[data-live]")];
    if (!live.some(held)) stamp = fresh.body.dataset.stamp;
    live.filter(old => !held(old)).forEach(old => {
      const found = fresh.getElementById(old.id);
      if (found) replace(old, found);
    });
  } catch {
    said.textContent = "the console does not answer";
  } finally {
    setTimeout(look, pause);
  }
}

if (document.querySelector("main [data-live]")) setTimeout(look, SOON);
document.querySelectorAll("form").forEach(form => form.addEventListener("change", event => {
  if (event.target.matches("select")) form.requestSubmit();
}));
