/* This process as the system knows it: its words, its user, and another program in its place. */
#include "everstep.h"

#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <pwd.h>
#include <signal.h>
#include <slurm/spank.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* The command line that this process was started with; NULL where it cannot be read. Never freed: exec follows. */
char **process_words(int *count)
{
	size_t length = 0, size = 1 << 16;
	char *text = NULL, *more = NULL, **words = NULL;
	int fd = open("/proc/self/cmdline", O_RDONLY | O_CLOEXEC);
	ssize_t got = 0;

	if (fd < 0)
		return NULL;
	do {
		length += (size_t)got;
		size *= 2;
		if (!(more = realloc(text, size)))
			break;
		text = more;
	} while ((got = read(fd, text + length, size - length - 1)) > 0);
	close(fd);
	if (more && got == 0) {
		text[length] = '\0';
		words = words_split(text, length, count);
	}
	if (!words)
		free(text);
	return words;
}

bool process_executable(const char *path)
{
	struct stat what;

	return stat(path, &what) == 0 && S_ISREG(what.st_mode) && access(path, X_OK) == 0;
}

/* Did we put this program in its own place, changed? The mark is taken away, so that nothing below inherits it. */
bool process_is_second_pass(void)
{
	const char *mark = getenv(VAR_PASS);
	bool ours = mark && strtol(mark, NULL, 10) == (long)getpid();

	if (mark)
		unsetenv(VAR_PASS);
	return ours;
}

/* May this user have it, by users= and groups=? */
bool process_allowed(const struct config *c)
{
	const struct passwd *user = NULL;
	gid_t *groups = NULL;
	int count = 0;
	bool allowed = false;

	if (!c->users && !c->groups)
		return true;
	user = getpwuid(getuid());
	if (user && c->users && config_lists(c->users, user->pw_name))
		return true;
	if (!c->groups || (count = getgroups(0, NULL)) < 0 || !(groups = calloc((size_t)count + 1, sizeof(*groups))))
		return false;
	count = getgroups(count, groups);
	if (count >= 0)
		groups[count++] = getegid();
	for (int i = 0; i < count && !allowed; i++) {
		const struct group *group = getgrgid(groups[i]);

		allowed = group && config_lists(c->groups, group->gr_name);
	}
	free(groups);
	return allowed;
}

/* Another program in this one's place, with our environment as it is now. Comes back only where that fails. */
void process_replace(const char *program, char **words)
{
	char mark[32];
	sigset_t none, before;

	snprintf(mark, sizeof(mark), "%ld", (long)getpid());
	if (setenv(VAR_PASS, mark, 1) < 0)
		return;
	/* srun has blocked its signals by now; whoever takes its place wants Ctrl-C to work. */
	sigemptyset(&none);
	sigprocmask(SIG_SETMASK, &none, &before);
	execv(program, words);
	slurm_error("everstep: %s cannot be started: %s", program, strerror(errno));
	sigprocmask(SIG_SETMASK, &before, NULL);
	unsetenv(VAR_PASS);
}
