// Starts an episode of a MiniWoB++ page from a seed, and returns its instruction when the page is ready.
// A finished episode's START cover must neither begin another one nor hide what the last action led to; 2e9 ms is the longest time that setTimeout takes.
async ([seed, mode]) => {
  core.EPISODE_MAX_TIME = 2e9;
  if (core.cover_div === null) core.startEpisode();
  core.cover_div.onclick = null;
  core.cover_div.style.opacity = 0;
  if (core.EP_TIMER !== null) core.endEpisode(0);
  core.setDataMode(mode);
  Math.seedrandom(seed);
  core.startEpisodeReal();
  while (!WOB_TASK_READY) await new Promise(done => setTimeout(done, 10));
  await new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)));
  const query = document.getElementById('query-pretty') || document.getElementById('query');
  return query.innerText.trim().replace(/\s+/g, ' ');
}
